// Widgets: the picture and the words of the state that is chosen.
const here = document.currentScript.src;
document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".states").forEach((box) => {
  const { name, label, at } = box.dataset, states = JSON.parse(box.dataset.states);
  const picture = box.closest(".cell_output").querySelector("img"), told = box.querySelector(".told");
  const choice = document.createElement("select"), words = document.createElement("label");
  choice.append(...states.map(([text], i) => new Option(text, i, i == at, i == at)));
  words.append(label, choice);
  box.prepend(words);
  choice.addEventListener("change", () => {
    picture.src = new URL(`${name}-${choice.value}.png`, here).href;
    told.innerHTML = states[choice.value][1];
    picture.alt = told.textContent;
  });
}));
// For keyboards and screen readers: a fold is called what it says, and what can be scrolled can be reached.
const reach = () => document.querySelectorAll(".bd-article :is(pre, math, .output, table, div)").forEach((part) => {
  if (part.scrollWidth > part.clientWidth && getComputedStyle(part).overflowX != "visible") part.tabIndex = 0;
});
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("summary[aria-label]").forEach((fold) => fold.removeAttribute("aria-label"));
  document.querySelectorAll("dt dl").forEach((list) => list.role = "none");  // a signature of several lines
  reach();
});
document.addEventListener("toggle", reach, true);
