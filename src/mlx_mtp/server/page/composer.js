// The field for a question, with images that are chosen, pasted or dropped.

import { $, add, addButton, notify } from "./dom.js";

let images = [];  // data URLs
let edited = null;  // the turn whose question is being edited

export function readQuestion() {
  return { text: $("question").value, images: [...images], edited };
}

// Fill the field: with nothing, or with the question of a turn.
export function fill(turn = null) {
  edited = turn;
  images = [...(turn?.images ?? [])];
  $("question").value = turn?.text ?? "";
  $("editing").hidden = turn === null;
  showImages();
  $("question").focus();
}

export function setRunning(isRunning) {
  const hadFocus = document.activeElement === $("stop");
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (hadFocus) $("send").focus();
}

export function setUpComposer() {
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("cancel").addEventListener("click", () => fill());
  $("files").addEventListener("change", async () => {
    await addImages($("files").files);
    $("files").value = "";
  });
  $("question").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    addImages(event.clipboardData.files);
  });
  document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    addImages(event.dataTransfer.files);
  });
}

const hasFiles = (event) => event.dataTransfer.types.includes("Files");

async function addImages(files) {
  const wrong = [...files].find((file) => !file.type.startsWith("image/"));
  notify(wrong ? `${wrong.name} is not an image.` : "");
  for (const file of [...files].filter((file) => file.type.startsWith("image/"))) images.push(await urlOf(file));
  showImages();
}

function urlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showImages() {
  $("images").replaceChildren();
  $("images").hidden = images.length === 0;
  images.forEach((url, i) => {
    const item = add($("images"), "li"), picture = add(item, "img");
    Object.assign(picture, { src: url, alt: `Image ${i + 1}` });
    addButton(item, "Remove", () => { images.splice(i, 1); showImages(); }, `Remove image ${i + 1}`);
  });
}
