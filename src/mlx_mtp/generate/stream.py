"""``generate`` and ``stream_generate``: mlx-lm's text generation, with the MTP head."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as StockResponse
from mlx_lm.generate import StopSequences, generation_stream, wired_limit
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cli.display import paint
from ..core.batch.generate_step import mtp_generate_step
from ..core.batch.ids import TokenIds, token_ids
from ..core.caches.prompt_cache import PromptCache, n_tokens
from ..core.caches.rows import KVOptions
from ..core.decoding.counts import DraftCounts, OfSource
from ..core.decoding.window import Token
from ..core.distributed import synchronize
from ..core.drafts.options import MAX_TOKENS, TextOptions, asks_for_copies
from ..core.drafts.sources import source_of
from ..core.layers.mtp import has_head
from ..core.sampling.sampler import for_one_text, thread_seed
from ..errors import MTPError, NotANumberError
from ..images.prompt import ImagePrompt, read_images, vision_of
from ..prompt_store import PromptStore
from ..prompt_store.store import cuts_of
from ..text.detokenizer import make_detokenizer, next_text

KV_NAMES = [field.name for field in fields(KVOptions)]
OPTIONS = [field.name for field in fields(TextOptions)]


def _counted(source: str, i: int) -> Any:
    """A property of responses: the drafts of a source (i = 0) or the accepted ones (1), by position in the window."""
    return property(lambda response: tuple(response.counts[source][i]) if source in response.counts else ())


@dataclass
class GenerationResponse(StockResponse):
    """mlx-lm's response, with the drafts made and accepted so far.

    ``generation_tps`` is without the first step and steps that made a trace: a new shape is traced once in a process, and its
    kernels are compiled once on a machine. If there is no other step, all tokens and all of the time count, as in mlx-lm.

    ``drafted`` and ``accepted`` are the counts of the head's drafts, ``copied`` and ``copies_accepted`` those of copies,
    ``forced`` and ``forced_accepted`` those of tokens that a grammar forces: a tuple each.

    Args:
        counts (Dict[str, OfSource]): By source, the number of drafts (``drafted``) and of these accepted (``accepted``), each a
          list by position in the window. The sources are ``"head"``, ``"copies"`` and ``"grammar"``.
        tokens_per_step (float): The mean number of tokens that a verify pass with drafts has yielded.
        source (str): ``"model"``, or the source of the accepted draft.
    """

    counts: Mapping[str, OfSource] = field(default_factory=dict)
    tokens_per_step: float = 1.0
    source: str = "model"

    drafted = _counted("head", 0)
    accepted = _counted("head", 1)
    copied = _counted("copies", 0)
    copies_accepted = _counted("copies", 1)
    forced = _counted("grammar", 0)
    forced_accepted = _counted("grammar", 1)


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | TokenIds,
    max_tokens: int | None = None,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    mtp: bool | None = None,
    options: TextOptions | None = None,
    prompt_store: PromptStore | None = None,
    images: Sequence[Any] = (),
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """A generator producing text based on the given prompt from the model, as mlx-lm's ``stream_generate``.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        tokenizer (PreTrainedTokenizer): The tokenizer.
        prompt (Union[str, mx.array, List[int]]): The input prompt string or token ids, as for :func:`mtp_generate_step`.
        max_tokens (int, optional): The maximum number of tokens to generate. Default: ``None``, that of ``options``, or
          ``256``.
        mtp (bool, optional): Draft with the MTP head; ``False`` is plain mlx-lm, unless ``copy_drafts`` is given. Default:
          ``None``, ``True`` if the model has a head.
        options (TextOptions, optional): Options of the text in one object; each may be given as an argument instead, such as
          ``num_draft_tokens=2``. Default: ``None``.
        prompt_store (PromptStore, optional): Prefilled prefixes of earlier texts, to which this prompt and its answer are
          added, see ``mlx_mtp.PromptStore``. Default: ``None``.
        images (Sequence[Union[str, Path, bytes, np.ndarray, PIL.Image.Image]]): A file, its bytes, or pixels for each
          ``<|vision_start|><|image_pad|><|vision_end|>`` of the prompt, in order. Requires a checkpoint with a vision encoder.
        kwargs: The remaining options get passed to :func:`mtp_generate_step`, or with ``mtp=False`` to mlx-lm.

    Yields:
        GenerationResponse: mlx-lm's response, with the drafts made and accepted.
    """
    keywords = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    if max_tokens is not None:
        keywords["max_tokens"] = max_tokens
    options = TextOptions.given(options, keywords).completed_by(TextOptions(MAX_TOKENS))
    mtp = has_head(model) if mtp is None else mtp
    drafts = mtp or asks_for_copies(options.copy_drafts)
    if kwargs.pop("draft_model", None) is not None:
        raise MTPError("A draft model requires mlx_lm.stream_generate.")
    if not mtp and options.draft_p_min:
        raise MTPError("draft_p_min requires mtp=True.")
    if not drafts and prompt_store is not None:
        raise MTPError("prompt_store requires mtp=True or copy_drafts.")
    if options.stop_sequences is not None:
        raise MTPError(
            "stop_sequences require BatchGenerator or mtp_generate_step: texts end here as the tokenizer says."
        )
    if options.max_tokens == 0:
        raise MTPError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens: Any = prompt
    if isinstance(prompt, str):  # encoded as in mlx-lm
        add_special_tokens = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        tokens = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    ids = token_ids(tokens, model)
    image_prompt = None
    if images:
        image_prompt = read_images(vision_of(model), ids, images)
        ids = image_prompt.tokens
        if prompt_store is None:
            kwargs["input_embeddings"] = image_prompt.embed(model)
            if drafts:
                kwargs["images"] = image_prompt.spans(n_tokens(kwargs.get("prompt_cache") or []))
            else:
                kwargs["prompt_cache"] = image_prompt.cache(model, kwargs.get("prompt_cache"))
    if not drafts:
        yield from _stream_plain(model, tokenizer, ids, stream, options, **kwargs)
        return
    options = options if mtp else replace(options, num_draft_tokens=0)
    steps: Callable[..., Generator[Token, None, None]] = mtp_generate_step
    if prompt_store is not None:
        steps = partial(stored_steps, prompt_store, tokenizer, image_prompt)
    yield from _stream_mtp(model, tokenizer, ids, stream, steps, options, **kwargs)


def _stream_plain(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    stream: mx.Stream | mx.ThreadLocalStream,
    options: TextOptions,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Convert the responses of mlx-lm's ``stream_generate``."""
    kwargs |= {"sampler": for_one_text(options.sampler), "logits_processors": options.logits_processors}
    if (ranks := getattr(model, "ranks", None)) is not None:  # all sample the same tokens
        with mx.stream(stream):
            mx.random.seed(ranks.broadcast(thread_seed()))
    try:
        detokenizer = make_detokenizer(tokenizer)
        for r in plain_stream_generate(model, tokenizer, prompt, options.max_tokens, stream=stream, **kwargs):
            if mx.isnan(r.logprobs.sum()):
                raise NotANumberError
            yield GenerationResponse(**vars(r) | {"text": next_text(detokenizer, r.token, r.finish_reason)})
    finally:
        if ranks is not None:
            synchronize(stream)


def _stream_mtp(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    stream: mx.Stream | mx.ThreadLocalStream,
    make_steps: Callable[..., Generator[Token, None, None]],
    options: TextOptions,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Convert the steps of ``mtp_generate_step`` to responses, as mlx-lm's ``stream_generate``."""
    detokenizer = make_detokenizer(tokenizer)
    counts = DraftCounts()
    # The ends of text are stop sequences, so that the steps end there, and the prompt cache has no tokens behind.
    options = replace(options, stop_sequences=StopSequences([[token] for token in tokenizer.eos_token_ids]))
    steps = make_steps(prompt, model, stream, options=options, counts=counts, **kwargs)

    def response(finish_reason: str | None = None) -> GenerationResponse:
        return GenerationResponse(
            text=next_text(detokenizer, token, finish_reason),
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=len(prompt),
            prompt_tps=len(prompt) / prompt_time,
            generation_tokens=n,
            generation_tps=counts.tokens_per_second or n / (time.perf_counter() - tic),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            counts={name: OfSource(*map(list, numbers)) for name, numbers in counts.by_source.items() if any(numbers)},
            tokens_per_step=counts.tokens_per_step,
            source=counts.source if from_draft else "model",
        )

    with wired_limit(model, [stream]):
        tic = time.perf_counter()
        # Close the steps before the last response, so that the prompt cache then holds exactly the tokens yielded.
        with closing(steps):
            for n, (token, logprobs, from_draft) in enumerate(steps, start=1):  # noqa: B007 (response reads them)
                if n == 1:
                    prompt_time = time.perf_counter() - tic
                    tic = time.perf_counter()
                if token in tokenizer.eos_token_ids or n == options.max_tokens:
                    break
                yield response()
        yield response("stop" if token in tokenizer.eos_token_ids else "length")


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | TokenIds,
    verbose: bool = False,
    *,
    show_drafts: bool = False,
    **kwargs: Any,
) -> str:
    """Generate a complete response from the model, as mlx-lm's ``generate``.

    Args:
       model (nn.Module): A model of ``mlx_mtp.load``.
       tokenizer (PreTrainedTokenizer): The tokenizer.
       prompt (Union[str, mx.array, List[int]]): The input prompt string or token ids, as for :func:`mtp_generate_step`.
       verbose (bool): If ``True``, print tokens and timing information. Default: ``False``.
       show_drafts (bool): With ``verbose``, color each token by its source if stdout is a terminal. Default: ``False``.
       kwargs: The remaining options get passed to :func:`stream_generate`.
    """
    return print_text(model, tokenizer, prompt, verbose, show_drafts, **kwargs)[0]


def print_text(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: Any, verbose: bool, show_drafts: bool, **kwargs: Any
) -> tuple[str, GenerationResponse]:
    """Generate a text as ``generate`` does. Return it with the last response."""
    text = ""
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(paint(response.text, response.source) if show_drafts else response.text, end="", flush=True)
        text += response.text
    if not verbose:
        return text, response
    print("\n" + "=" * 10)
    if not text:
        print("No text generated for this prompt")
        return text, response
    print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    print(f"Peak memory: {response.peak_memory:.3f} GB")
    rates = [f"{a / d:.3f}" for a, d in zip(response.accepted, response.drafted)]
    drafts = [f"{', '.join(rates)} accepted by position"] if rates else []
    drafts += accepted_of({name: numbers for name, numbers in response.counts.items() if name != "head"})
    mtp = kwargs.get("mtp")
    if drafts or (has_head(model) if mtp is None else mtp):
        print(f"Drafts: {', '.join(drafts) or 'none'}, {response.tokens_per_step:.3f} tokens-per-step")
    return text, response


def accepted_of(counts: Mapping[str, OfSource]) -> list[str]:
    """How many drafts of each source are accepted, in words."""
    return [
        f"{sum(n.accepted)} of {sum(n.drafted)} {source_of(name)[0].split()[0]} tokens accepted"
        for name, n in counts.items()
    ]


def stored_steps(
    store: PromptStore,
    tokenizer: TokenizerWrapper,
    image_prompt: ImagePrompt | None,
    tokens: list[int],
    model: Any,
    stream: Any,
    **options: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """``mtp_generate_step`` with a prompt store in place of a prompt cache: prefill begins after the stored prefix of the
    prompt, and the rest is stored.
    """
    for name in ("prompt_cache", "input_embeddings"):
        if options.pop(name, None) is not None:
            raise MTPError(f"prompt_store and {name} cannot be combined.")
    if store.model is not model:
        raise MTPError("The prompt store belongs to another model: make one with PromptStore(model).")
    if model.ranks is not None:
        raise MTPError("A prompt store serves one process: omit prompt_store on several machines.")
    key = tokens[:] if image_prompt is None else image_prompt.key[:]
    # The quantization is that of the whole text, since its parts are read one by one.
    kv = KVOptions(**{name: options[name] for name in KV_NAMES if name in options}).of_text(0, len(tokens))
    options |= vars(kv)
    entries, n, handle = store.fetch(key[:-1], kv)
    cache = PromptCache(entries, len(model.layers))
    progress = options.get("prompt_progress_callback") or (lambda *_: None)
    cuts = [cut - n for cut in cuts_of(tokenizer, tokens, store.n_common(key)) if cut > n]

    def at_chunk(n_read: int, _: int) -> None:
        nonlocal handle
        progress(n + n_read, len(tokens))
        if n_read in cuts:
            with mx.stream(stream):
                handle = store.insert(key[: n + n_read], entries, kv, handle)

    options |= {
        "prompt_cache": cache,
        "all_tokens": tokens[:n],
        "prompt_cuts": cuts,
        "prompt_progress_callback": at_chunk,
    }
    if image_prompt is not None:
        options |= {"input_embeddings": image_prompt.embed(model, n), "images": image_prompt.images}
    is_sound = True
    try:
        with closing(mtp_generate_step(tokens[n:], model, stream, **options)) as steps:
            for step in steps:
                key.append(step[0])
                yield step
    except (RuntimeError, NotANumberError):  # of the device: the last steps may have computed nothing
        is_sound = False
        raise
    finally:
        # Fewer tokens after Ctrl-C before the first one; unknown ones after a failure in the end of the steps.
        n_read = cache.n_recorded
        if is_sound and n_read >= 0:
            with mx.stream(stream):
                store.insert(key[:n_read], entries, kv, handle)
