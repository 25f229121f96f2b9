// Wires the page: legend, buttons, and the start.
"use strict";

View.prototype.legend = function () {
  const found = new Set(), categories = this.data.categories;
  for (const timeline of this.data.timelines) {
    for (const lane of timeline.lanes)
      for (let i = 0; i < lane.count; i++) {
        const category = categories[lane.category[i]];
        found.add(category !== "message" || ofPipeline(this.data.texts[lane.name[i]]) ? category : "collective");
      }
    if (timeline.memory.some((memory) => memory.at.length)) found.add("memory");
  }
  // Ops are seen when zoomed in, those that take time.
  (this.data.ops.category || []).forEach((category, op) => this.data.ops.us[op] && found.add(categories[category]));
  const colours = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  this.root.querySelector("#legend").replaceChildren(
    ...Object.keys(MEANING).filter((key) => found.has(key)).map((key) => {
      const entry = document.createElement("span"), box = document.createElement("i");
      box.style.background = Array.isArray(colours[key]) ? colours[key][0] : colours[key];
      if (key === "exposed")
        box.style.background = `repeating-linear-gradient(135deg, ${colours.exposed} 0 2px, ${colours.exposedGround} 2px 5px)`;
      entry.dataset.category = key;
      entry.append(box, MEANING[key]);
      return entry;
    }),
  );
};

View.prototype.buttons = function () {
  const acts = {
    in: () => this.zoom(1.6), out: () => this.zoom(1 / 1.6), fit: () => this.look(0, this.everything),
    left: () => this.move(-0.3), right: () => this.move(0.3),
  };
  for (const button of this.root.querySelectorAll("button[data-do]")) button.addEventListener("click", acts[button.dataset.do]);
  for (const box of this.root.querySelectorAll("input[data-show]"))
    box.addEventListener("change", () => { this.shown[box.dataset.show] = box.checked; this.chosen = null; this.hide(); this.arrange(); });
};

const root = document.getElementById("timelines");
if (root) {
  unpack(document.getElementById("data").textContent)
    .then((data) => new View(data, root))
    .catch((error) => {
      document.getElementById("status").textContent = `The timelines cannot be drawn: ${error}. A browser from 2023 or later is needed.`;
      document.documentElement.dataset.ready = "failed";
    });
}
