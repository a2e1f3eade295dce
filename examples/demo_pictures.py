"""The pictures that the demo's vision encoder is trained on, each with its caption.

Numbers, words and coloured shapes, drawn with Pillow in its own font. One number in ten is held out; of words and shapes
only the drawings are: their places, sizes and shades.
"""

import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
    "black": (20, 20, 20),
    "purple": (150, 60, 180),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
WORDS = (
    *("name", "value", "list", "file", "path", "text", "line", "key", "data", "item", "count", "total"),
    *("class", "print", "return", "import", "index", "range", "open", "read", "write", "true", "false", "none"),
)
KINDS = {"number": 0.3, "word": 0.2, "shape": 0.5}  # and how often each is drawn
HELD_OUT = 10  # one number in so many
COLOURED = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
SYMBOLS = ("", "number", *"0123456789", "word", *WORDS, "small", "large", *COLOURED)


@dataclass(frozen=True)
class Picture:
    """A drawing.

    Args:
        image (Image): RGB; its sides are multiples of 16.
        caption (str): What is to be said of it.
        kind (str): One of ``KINDS``.
        symbols (Tuple[str, ...]): What the caption says, of ``SYMBOLS``.
    """

    image: Image.Image
    caption: str
    kind: str
    symbols: tuple[str, ...]


def draw_picture(rng: random.Random, held_out: bool, kind: str | None = None) -> Picture:
    """A picture of the training set, or, with another rng, of what is held out."""
    kind = kind or rng.choices(list(KINDS), KINDS.values())[0]
    while True:
        picture = DRAW[kind](rng)
        if kind != "number" or is_held_out(picture.caption) == held_out:
            return picture


def is_held_out(caption: str) -> bool:
    return zlib.crc32(caption.encode()) % HELD_OUT == 0


def draw_number(rng: random.Random) -> Picture:
    text = str(rng.randrange(100))
    return Picture(draw_text(rng, text), f"The number {text}.", "number", ("number", *text))


def draw_word(rng: random.Random) -> Picture:
    text = rng.choice(WORDS)
    return Picture(draw_text(rng, text), f"The word {text}.", "word", ("word", text))


def draw_text(rng: random.Random, text: str) -> Image.Image:
    """Dark on light, 64 x 32 pixels."""
    size = (64, 32)
    image = Image.new("RGB", size, light(rng))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(rng.randint(18, 20))
    left, top, right, bottom = draw.textbbox((0, 0), text, font)
    x = rng.randint(0, max(0, min(16, size[0] - (right - left))))
    y = (size[1] - (bottom - top)) // 2 + rng.randint(-4, 4)
    draw.text((x - left, y - top), text, tuple(rng.randrange(90) for _ in range(3)), font)
    return image


def draw_coloured(rng: random.Random) -> Picture:
    """A small or a large shape."""
    shape, colour, size = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(("small", "large"))
    width, height = rng.choice(((48, 48), (64, 32), (32, 64)))
    image = Image.new("RGB", (width, height), light(rng))
    draw_shape(rng, image, shape, colour, rng.randint(10, 14) if size == "small" else rng.randint(22, 28))
    return Picture(image, f"A {size} {colour} {shape}.", "shape", (size, f"{colour} {shape}"))


def light(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(215, 255) for _ in range(3))


def draw_shape(rng: random.Random, image: Image.Image, shape: str, colour: str, size: int) -> None:
    """Draw a shape of a size in pixels, anywhere."""
    draw, (x, y) = ImageDraw.Draw(image), (rng.randint(1, side - size - 1) for side in image.size)
    fill = tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in COLOURS[colour])
    whole = (x, y, x + size, y + size)
    if shape == "circle":
        draw.ellipse(whole, fill)
    elif shape == "square":
        draw.rectangle(whole, fill)
    elif shape == "triangle":
        draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill)
    elif shape == "cross":
        third = size // 3
        draw.rectangle((x + third, y, x + size - third, y + size), fill)
        draw.rectangle((x, y + third, x + size, y + size - third), fill)
    else:
        draw.ellipse(whole, outline=fill, width=max(2, size // 6))


DRAW = {"number": draw_number, "word": draw_word, "shape": draw_coloured}
