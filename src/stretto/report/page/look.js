// How things look: sizes, colours, rows, and what is narrower than a pixel. Knows no canvas but the one it is given.
// Colours are of Okabe and Ito's palette, which people with any colour vision tell apart; labels say the same.
"use strict";

const GUTTER = 96, RIGHT = 14, RULER = 24, COMPUTE = 30, MESSAGE = 14, MEMORY = 28, GAP = 12, OPS_TOP = 13;
const LEAST_OP_PX = 1.2, LEAST_RUN_PX = 110; // ops appear in runs that are this wide, and they on average
const MEANING = {
  F: "F  forward", I: "I  input gradient", W: "W  weight gradient", B: "B  backward (I and W)", R: "R  recomputation",
  S: "S  once a step",  exposed: "exposed communication", bubble: "bubble: nothing to do", message: "pp message", collective: "collective",
  memory: "memory in use",
};
const LIGHT = {
  F: ["#0072b2", "#2b8cc4", "#005a8e"], I: ["#e69f00", "#f2b63c", "#d08f00"], W: ["#009e73", "#35b48f", "#008a64"],
  B: ["#a8457a", "#bb5f90", "#8f3566"], R: ["#56b4e9", "#7cc5ee", "#3fa4dd"], S: ["#f0e442", "#f5ec7a", "#d9cd2f"], exposed: "#d55e00", exposedGround: "#ffe6d3",
  bubble: "#e6e9ee", message: "#93a1b5", collective: "#8577c9", memory: "#b9c6d6", memoryLine: "#5d6878",
  row: "#f6f7f9", grid: "#dfe3e9", ink: "#1b2330", quiet: "#5d6878", onDark: "#ffffff", onLight: "#171200", mark: "#000000",
};
const DARK = {
  ...LIGHT, F: ["#2b8cc4", "#4aa3d6", "#1a78ae"], exposed: "#ff8a3d", exposedGround: "#4a2710", bubble: "#252c37",
  message: "#66758b", collective: "#8f83d6", memory: "#334054", memoryLine: "#8a98ab", row: "#191e26", grid: "#2b323d",
  ink: "#eef2f7", quiet: "#9aa6b5", mark: "#ffffff",
};
const LETTERS = '11px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// Whether a communication is the pipeline's own: a message, the loss, a tied gradient.
function ofPipeline(name) { return /^(pp \d|pp loss|pp tied|e\d|loss|tied)/.test(name); }

// Rows of a timeline from the top: {kind, y, height, lane | rank}.
function layout(timeline, shown) {
  const rows = [];
  let y = 4, rank = -1;
  const put = (kind, height, more) => { rows.push({ kind, y, height, ...more }); y += height + 2; };
  const close = () => {
    if (rank >= 0 && shown.memory && timeline.memory[rank] && timeline.memory[rank].at.length) put("memory", MEMORY, { rank });
    if (rank >= 0) y += GAP;
  };
  for (const lane of timeline.lanes) {
    if (lane.rank !== rank) { close(); rank = lane.rank; }
    if (lane.compute) put("compute", COMPUTE, { lane, rank });
    else if (shown.messages) put("message", MESSAGE, { lane, rank });
  }
  close();
  return { rows, height: Math.max(y - GAP + 6, COMPUTE) };
}

// Spans narrower than this are not drawn one by one, as each would seem wider than it is.
const NARROW_PX = 1.5;
const STACK = ["F", "I", "W", "B", "R", "S", "bubble", "message", "collective", "exposed"];

// Narrow spans, added up by category for each pixel: the area of a colour is the time that it stands for.
class Narrow {
  constructor(width) {
    this.width = width;
    this.sums = new Map();
  }

  add(category, from, to) {
    let column = this.sums.get(category);
    if (!column) this.sums.set(category, (column = new Float32Array(this.width + 1)));
    for (let pixel = Math.max(0, Math.floor(from)); pixel < to && pixel < this.width; pixel++)
      column[pixel] += Math.min(to, pixel + 1) - Math.max(from, pixel);
  }

  // A pixel that narrow spans fill in part only is faint, but never too faint to see.
  paint(context, y, height, colourOf) {
    const found = STACK.filter((category) => this.sums.has(category)).map((category) => [colourOf(category), this.sums.get(category)]);
    for (let pixel = 0; found.length && pixel < this.width; pixel++) {
      const total = found.reduce((sum, [, column]) => sum + column[pixel], 0);
      if (!total) continue;
      context.globalAlpha = Math.min(1, Math.max(0.35, total));
      let top = y;
      for (const [colour, column] of found) {
        const share = (column[pixel] / total) * height;
        context.fillStyle = colour;
        if (share) context.fillRect(pixel, top, 1, share);
        top += share;
      }
    }
    context.globalAlpha = 1;
  }
}
