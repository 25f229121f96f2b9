// The timelines as one thing to look at: a common view in time, moved by wheel, drag, buttons and keys.
"use strict";

const LEAST_VIEW_US = 0.05;
const TALLEST = 0.82; // of the window; more lanes scroll inside

class View {
  constructor(data, root) {
    this.data = data;
    this.root = root;
    this.shown = { messages: true, memory: true };
    this.chosen = null;
    this.tip = root.querySelector("#tip");
    this.status = root.querySelector("#status");
    data.opNumber = new Map((data.ops.name || []).map((name, op) => [data.texts[name], op]));
    this.panels = data.timelines.map((timeline, at) => this.panel(timeline, at));
    this.legend();
    this.buttons();
    const asked = /view=([\d.]+),([\d.]+)/.exec(location.hash);
    this.everything = data.longest * 1.01;
    this.view = { from: 0, to: this.everything };
    if (asked) this.look(Number(asked[1]), Number(asked[2]));
    this.arrange();
    new ResizeObserver(() => this.arrange()).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.legend(); this.paint(); });
  }

  // --- what there is ---------------------------------------------------------------------------------

  panel(timeline, at) {
    const box = this.root.querySelectorAll(".lanes")[at], canvas = box.querySelector("canvas");
    const panel = { timeline, box, canvas, pad: box.querySelector(".pad"), painter: new Painter(this.data, canvas) };
    box.addEventListener("scroll", () => this.paint());
    canvas.addEventListener("wheel", (event) => this.wheel(panel, event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(panel, event));
    canvas.addEventListener("pointermove", (event) => this.hover(panel, event));
    canvas.addEventListener("pointerleave", () => this.hide());
    canvas.addEventListener("dblclick", () => this.look(0, this.everything));
    canvas.addEventListener("keydown", (event) => this.key(panel, event));
    canvas.addEventListener("blur", () => this.hide());
    return panel;
  }

  arrange() {
    for (const panel of this.panels) {
      const { rows, height } = layout(panel.timeline, this.shown);
      panel.rows = rows;
      const all = RULER + height, most = Math.max(240, innerHeight * TALLEST);
      panel.size = { width: panel.box.clientWidth, height: Math.min(all, most) };
      panel.box.style.height = `${panel.size.height + 2}px`; // with its border
      panel.canvas.style.height = `${panel.size.height}px`;
      panel.pad.style.height = `${Math.max(0, all - panel.size.height)}px`;
    }
    this.paint();
  }

  paint() {
    if (this.waiting) return;
    this.waiting = true;
    const now = () => {
      if (!this.waiting) return;
      this.waiting = false;
      for (const { painter, timeline, rows, size, box } of this.panels)
        painter.paint(timeline, rows, this.view, size, box.scrollTop, this.chosen);
      const told = this.data.timelines.map((timeline) => {
        const spans = timeline.lanes.reduce((sum, lane) => sum + lane.count, 0);
        return `${timeline.title}: ${timeline.ranks} pipeline rank${timeline.ranks === 1 ? "" : "s"}, ${timeline.lanes.length} lane${timeline.lanes.length === 1 ? "" : "s"}, ${spans} spans`;
      });
      this.status.textContent = `${told.join(". ")}. Shown: ${timeText(this.view.from)} to ${timeText(this.view.to)}.`;
      document.documentElement.dataset.ready = "yes";
    };
    // A tab that nobody sees has no frames; its page shall be right all the same.
    requestAnimationFrame(now);
    setTimeout(now, 40);
  }

  // --- moving ----------------------------------------------------------------------------------------

  look(from, to) {
    const length = Math.min(Math.max(to - from, LEAST_VIEW_US), this.everything);
    const start = Math.min(Math.max(0, from), this.everything - length);
    this.view = { from: start, to: start + length };
    clearTimeout(this.later);
    this.later = setTimeout(() => {
      const whole = length >= this.everything;
      history.replaceState(null, "", whole ? location.pathname : `#view=${start.toFixed(2)},${(start + length).toFixed(2)}`);
    }, 300);
    this.paint();
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    this.look(around - (around - this.view.from) / factor, around + (this.view.to - around) / factor);
  }

  move(share) {
    const length = this.view.to - this.view.from, from = Math.min(Math.max(0, this.view.from + share * length), this.everything - length);
    this.look(from, from + length);
  }

  wheel(panel, event) {
    // A page must scroll under the pointer; who has clicked the timeline, or holds a key, means to zoom.
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === panel.canvas;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / 800);
    else if (event.shiftKey) this.move(event.deltaY / 800);
    else if (zooms) this.zoom(Math.exp(-event.deltaY / 400), panel.painter.time(event.offsetX));
    else return;
    event.preventDefault();
    this.hide();
  }

  press(panel, event) {
    if (event.button !== 0) return;
    const start = event.offsetX, view = { ...this.view }, mark = this.root.querySelector("#range");
    const slide = event.shiftKey, at = panel.canvas.getBoundingClientRect().left;
    const shift = (x) => {
      if (slide) {
        const by = ((start - x) / panel.painter.span) * (view.to - view.from);
        const from = Math.min(Math.max(0, view.from + by), this.everything - (view.to - view.from));
        this.look(from, from + view.to - view.from);
      } else if (Math.abs(x - start) > 4) {
        const box = panel.canvas.getBoundingClientRect(), left = Math.max(GUTTER, Math.min(start, x));
        Object.assign(mark.style, {
          display: "block", left: `${box.left + left}px`, width: `${Math.max(start, x) - left}px`,
          top: `${box.top}px`, height: `${box.height}px`,
        });
      }
    };
    const drag = (e) => { this.hide(); shift(e.clientX - at); };
    const done = (e) => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", done);
      removeEventListener("pointercancel", done);
      mark.style.display = "none";
      const x = e.clientX - at;
      if (e.type === "pointercancel" || slide) return;
      if (Math.abs(x - start) > 4) {
        const ends = [panel.painter.time(Math.max(GUTTER, Math.min(start, x))), panel.painter.time(Math.max(start, x))];
        this.look(ends[0], ends[1]);
      } else this.choose(panel, this.under(panel, e.clientX - at, e.clientY - panel.canvas.getBoundingClientRect().top));
    };
    addEventListener("pointermove", drag);
    addEventListener("pointerup", done);
    addEventListener("pointercancel", done);
  }

  key(panel, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), w: () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5),
      s: () => this.zoom(1 / 1.5), ArrowLeft: () => this.move(-0.15), a: () => this.move(-0.15),
      ArrowRight: () => this.move(0.15), d: () => this.move(0.15), 0: () => this.look(0, this.everything),
      Home: () => this.look(0, this.everything), ",": () => this.step(panel, -1), ".": () => this.step(panel, 1),
      ArrowUp: () => this.change(panel, -1), ArrowDown: () => this.change(panel, 1),
      Enter: () => this.chosen && this.frame(this.chosen), Escape: () => this.choose(panel, null),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // --- choosing --------------------------------------------------------------------------------------

  under(panel, x, y) {
    const at = y - RULER + panel.box.scrollTop, time = panel.painter.time(x);
    const row = panel.rows.find((r) => at >= r.y && at <= r.y + r.height);
    if (!row || x < GUTTER || y < RULER || time > panel.timeline.step) return null;
    if (row.kind === "memory") return { row, time };
    const { view } = this, slack = (2 * (view.to - view.from)) / panel.painter.span, index = spanAt(row.lane, time, slack);
    if (index < 0) return null;
    const found = { row, lane: row.lane, index, time };
    const number = row.lane.run[index];
    if (row.kind === "compute" && at - row.y > OPS_TOP && number >= 0 && panel.painter.opsShown(row.lane, number))
      eachOp(this.data, panel.timeline, row.lane, row.lane.runs[number], time, time, (op, begin, end) => { found.op = { op, begin, end }; });
    return found;
  }

  facts(panel, found) {
    const { data } = this, { timeline } = panel;
    if (found.row.kind === "memory") return memoryFacts(data, timeline, found.row.rank, found.time);
    if (found.op) return opFacts(data, timeline, found.op.op, found.op.begin, found.op.end);
    return spanFacts(data, timeline, found.lane, found.index);
  }

  hover(panel, event) {
    if (event.buttons) return;
    const found = this.under(panel, event.offsetX, event.offsetY);
    if (found) this.show(this.facts(panel, found), event.clientX, event.clientY);
    else this.hide();
  }

  show(facts, x, y) {
    const [[title], ...rest] = facts, head = document.createElement("b"), list = document.createElement("dl");
    head.textContent = title;
    for (const [what, value] of rest) {
      const name = document.createElement("dt"), told = document.createElement("dd");
      [name.textContent, told.textContent] = [what, value];
      list.append(name, told);
    }
    this.tip.replaceChildren(head, list);
    this.tip.style.display = "block";
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - width - 12 : x + 16)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 6))}px`;
  }

  hide() { this.tip.style.display = "none"; }

  choose(panel, found) {
    this.chosen = found && found.lane ? found : null;
    this.hide();
    if (this.chosen) {
      const { lane, index, row } = this.chosen, box = panel.canvas.getBoundingClientRect();
      const middle = panel.painter.x(Math.max(lane.begin[index], this.view.from));
      this.show(this.facts(panel, this.chosen), box.left + middle, box.top + RULER + row.y + row.height - panel.box.scrollTop);
    }
    this.paint();
  }

  // The span before or after the chosen one on its lane; the first in view when none is chosen.
  step(panel, by) {
    const rows = panel.rows.filter((row) => row.lane && row.lane.count), now = this.chosen;
    const row = now && rows.includes(now.row) ? now.row : rows[0];
    if (!row) return;
    const index = now && now.row === row ? now.index + by : above(row.lane.end, this.view.from);
    if (index >= 0 && index < row.lane.count) this.reveal(panel, { row, lane: row.lane, index });
  }

  // The lane above or below, at the same time.
  change(panel, by) {
    const rows = panel.rows.filter((row) => row.lane && row.lane.count), now = this.chosen;
    if (!now || !rows.includes(now.row)) return this.step(panel, 1);
    const row = rows[rows.indexOf(now.row) + by];
    if (!row) return;
    const time = now.lane.begin[now.index], index = Math.min(row.lane.count - 1, above(row.lane.end, time));
    this.reveal(panel, { row, lane: row.lane, index });
  }

  reveal(panel, found) {
    const { lane, index, row } = found, length = this.view.to - this.view.from;
    if (lane.end[index] < this.view.from || lane.begin[index] > this.view.to) this.look(lane.begin[index] - length / 4, lane.begin[index] + (3 * length) / 4);
    const top = panel.box.scrollTop, room = panel.size.height - RULER;
    if (row.y < top) panel.box.scrollTop = row.y;
    else if (row.y + row.height > top + room) panel.box.scrollTop = row.y + row.height - room;
    panel.painter.view = this.view;
    this.choose(panel, found);
  }

  frame({ lane, index }) {
    const run = lane.compute && lane.runs[lane.run[index]], spans = run ? run.spans : [index];
    const from = lane.begin[spans[0]], to = lane.end[spans[spans.length - 1]];
    this.look(from - 0.05 * (to - from), to + 0.05 * (to - from));
  }
}
