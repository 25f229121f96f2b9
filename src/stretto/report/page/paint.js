// Paints one timeline's lanes on a canvas. Knows what lies where and what it is called; nothing of events.
"use strict";

class Painter {
  constructor(data, canvas) {
    this.data = data;
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.widths = new Map();
  }

  get span() { return this.width - GUTTER - RIGHT; }
  x(time) { return GUTTER + ((time - this.view.from) / (this.view.to - this.view.from)) * this.span; }
  seen(begin, end) { return Math.min(this.x(end), GUTTER + this.span) - Math.max(this.x(begin), GUTTER); }
  time(x) { return this.view.from + ((x - GUTTER) / this.span) * (this.view.to - this.view.from); }

  // Paint what is in view: `top` is how far the rows are scrolled, `chosen` the span to mark.
  paint(timeline, rows, view, size, top, chosen) {
    const ratio = window.devicePixelRatio || 1, c = this.context;
    [this.width, this.height, this.view, this.timeline] = [size.width, size.height, view, timeline];
    if (this.canvas.width !== Math.round(size.width * ratio)) this.canvas.width = Math.round(size.width * ratio);
    if (this.canvas.height !== Math.round(size.height * ratio)) this.canvas.height = Math.round(size.height * ratio);
    this.colours = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, size.width, size.height);
    c.font = LETTERS;
    c.textBaseline = "middle";
    this.hatching = this.hatch();
    this.drawn = { spans: 0, ops: 0 };
    c.save();
    c.beginPath();
    c.rect(0, RULER, size.width, size.height - RULER);
    c.clip();
    for (const row of rows) {
      const y = RULER + row.y - top;
      if (y + row.height < RULER || y > size.height) continue;
      this.label(row, y);
      c.save();
      c.beginPath();
      c.rect(GUTTER, y, this.span, row.height);
      c.clip();
      c.fillStyle = this.colours.row;
      c.fillRect(GUTTER, y, this.span, row.height);
      if (row.kind === "memory") this.memory(row.rank, y, row.height);
      else this.lane(row.lane, y, row.height);
      if (chosen && chosen.lane === row.lane && row.lane) this.mark(row.lane, chosen.index, y, row.height);
      c.restore();
    }
    this.end(timeline.step);
    c.restore();
    this.ruler();
    Object.assign(this.canvas.dataset, this.drawn);
  }

  hatch() {
    const tile = document.createElement("canvas"), size = 8;
    tile.width = tile.height = size;
    const c = tile.getContext("2d");
    c.fillStyle = this.colours.exposedGround;
    c.fillRect(0, 0, size, size);
    c.strokeStyle = this.colours.exposed;
    c.lineWidth = 2.4;
    for (const off of [-size, 0, size]) {
      c.beginPath();
      c.moveTo(off - 1, size + 1);
      c.lineTo(off + size + 1, -1);
      c.stroke();
    }
    return this.context.createPattern(tile, "repeat");
  }

  textWidth(words) {
    let width = this.widths.get(words);
    if (width === undefined) this.widths.set(words, (width = this.context.measureText(words).width));
    return width;
  }

  // The first of `choices` that fits between two x, in the middle of what is seen of it.
  fit(choices, from, to, y, colour) {
    const left = Math.max(from, GUTTER), right = Math.min(to, GUTTER + this.span);
    const words = choices.find((choice) => this.textWidth(choice) + 6 <= right - left);
    if (!words) return;
    this.context.fillStyle = colour;
    this.context.textAlign = "center";
    this.context.fillText(words, (left + right) / 2, y);
  }

  label(row, y) {
    const c = this.context;
    if (row.kind === "compute") {
      c.fillStyle = this.colours.ink;
      c.textAlign = "left";
      c.font = `600 ${LETTERS}`;
      let name = this.timeline.names[row.rank];
      if (c.measureText(name).width > GUTTER - 16) name = name.replace("ranks ", ""); // the tip has all of it
      c.fillText(name, 12, y + row.height / 2);
      c.font = LETTERS;
      return;
    }
    let words = row.kind === "memory" ? `≤ ${bytesText(this.timeline.highest)}` : row.lane.row;
    while (this.textWidth(words) > GUTTER - 18 && words.length > 2) words = `${words.slice(0, -2)}…`;
    c.fillStyle = this.colours.quiet;
    c.textAlign = "right";
    c.fillText(words, GUTTER - 8, y + row.height / 2 + 0.5);
  }

  lane(lane, y, height) {
    const { from, to } = this.view, [first, last] = touching(lane, from, to), c = this.context;
    const narrow = new Narrow(GUTTER + this.span);
    for (let i = first; i < last; i++) {
      if (lane.end[i] < from) continue;
      const x = this.x(lane.begin[i]), right = this.x(lane.end[i]);
      this.drawn.spans++;
      const category = this.data.categories[lane.category[i]], width = right - x - (right - x > 4 ? 0.8 : 0);
      const name = this.data.texts[lane.name[i]], pipe = ofPipeline(name);
      if (right - x < NARROW_PX) narrow.add(category === "message" && !pipe ? "collective" : category, x, Math.max(right, x + 0.02));
      else if (lane.compute) this.compute(lane, i, category, x, width, y, height);
      else {
        c.fillStyle = pipe ? this.colours.message : this.colours.collective;
        c.fillRect(x, y, width, height);
        const short = name.startsWith(lane.row) ? name.slice(lane.row.length).trim() : name;
        const words = [short || name, short.split(" ")[0] || name];
        if (lane.microbatch[i] >= 0) words.push(String(lane.microbatch[i]));
        const next = i + 1 < lane.count ? this.x(lane.begin[i + 1]) : Infinity;
        this.fit(words, x, Math.min(x + width, next), y + height / 2 + 0.5, pipe ? this.colours.ink : this.colours.onDark);
      }
    }
    narrow.paint(c, y, height, (category) => [this.colours[category]].flat()[0]);
    if (lane.compute) this.runs(lane, y, height);
  }

  compute(lane, i, category, x, width, y, height) {
    const c = this.context, colours = this.colours, name = this.data.texts[lane.name[i]];
    if (category === "exposed") {
      c.fillStyle = width < 5 ? colours.exposed : this.hatching;
      c.fillRect(x, y, width, height);
      if (width >= 5) {
        c.strokeStyle = colours.exposed;
        c.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      }
      const axis = /^(dp|dp_shard|tp|cp|ep) /.test(name) ? name.split(" ")[0] : "pp";
      const words = [`exposed ${axis}`, axis].find((choice) => this.textWidth(choice) + 12 <= this.seen(lane.begin[i], lane.end[i]));
      if (words) {
        // A plate under the words, as hatching makes them hard to read.
        const seen = [Math.max(x, GUTTER), Math.min(x + width, GUTTER + this.span)], half = this.textWidth(words) / 2 + 4;
        c.fillStyle = colours.exposedGround;
        c.fillRect((seen[0] + seen[1]) / 2 - half, y + height / 2 - 8, 2 * half, 16);
        this.fit([words], x, x + width, y + height / 2 + 0.5, colours.ink);
      }
    } else if (category === "bubble") {
      c.fillStyle = colours.bubble;
      c.fillRect(x, y, width, height);
      this.fit(["bubble"], x + 4, x + width - 4, y + height / 2 + 0.5, colours.quiet);
    } else {
      const microbatch = Math.max(0, lane.microbatch[i]);
      c.fillStyle = colours[category][microbatch % 3];
      c.fillRect(x, y, width, height);
      const run = lane.runs[lane.run[i]];
      if (!this.opsShown(lane, lane.run[i]) && (!run || run.spans.length === 1)) {
        const ink = category === "F" || category === "B" ? colours.onDark : colours.onLight;
        const number = lane.microbatch[i] < 0 ? [] : [String(lane.microbatch[i])];
        this.fit([name, ...number], x, x + width, y + height / 2 + 0.5, ink);
      }
    }
  }

  opsShown(lane, number) {
    const run = lane.runs[number], window = run && this.data.windows.get(run.window);
    if (!window || !window.count) return false;
    const pixels = (run.compute / (this.view.to - this.view.from)) * this.span;
    return pixels / window.count >= LEAST_OP_PX && pixels > LEAST_RUN_PX;
  }

  // Ops inside the runs that are wide enough: the action's name above, its ops below.
  runs(lane, y, height) {
    const { from, to } = this.view, c = this.context, { ops, texts, categories } = this.data;
    lane.runs.forEach((run, number) => {
      if (!run.spans.length) return;
      const begin = lane.begin[run.spans[0]], end = lane.end[run.spans[run.spans.length - 1]];
      if (end < from || begin > to) return;
      if (!this.opsShown(lane, number)) {
        if (run.spans.length > 1) this.plate(lane, run, begin, end, y, height);
        return;
      }
      eachOp(this.data, this.timeline, lane, run, from, to, (op, opBegin, opEnd) => {
        const x = this.x(opBegin), width = this.x(opEnd) - x;
        if (width < 0.4) return;
        this.drawn.ops++;
        const category = categories[ops.category[op]], heavy = ops.flops[op] > 0;
        c.fillStyle = this.colours[category][heavy ? 2 : 1];
        c.fillRect(x, y + OPS_TOP, Math.max(0.5, width - (width > 2 ? 0.7 : 0)), height - OPS_TOP);
        const ink = category === "F" || category === "B" ? this.colours.onDark : this.colours.onLight;
        this.fit([texts[ops.name[op]]], x, x + width, y + OPS_TOP + (height - OPS_TOP) / 2 + 0.5, ink);
      });
      this.plate(lane, run, begin, end, y, OPS_TOP);
    });
  }

  // The name of a run that waits may cut in pieces: on the pieces that hold it, else on a plate over all of them.
  // Between those of what runs once a step is other work.
  plate(lane, run, begin, end, y, height) {
    const widest = run.spans.reduce((a, b) => (lane.end[b] - lane.begin[b] > lane.end[a] - lane.begin[a] ? b : a));
    const category = this.data.categories[lane.category[widest]], name = this.data.texts[lane.name[widest]];
    const colour = this.colours[category][Math.max(0, lane.microbatch[widest]) % 3];
    const ink = category === "F" || category === "B" ? this.colours.onDark : this.colours.onLight;
    const once = lane.microbatch[widest] < 0, need = this.textWidth(name) + 6, fits = run.spans.filter((i) => this.seen(lane.begin[i], lane.end[i]) >= need);
    // Many pieces that could hold it would be many labels: below the height of ops, one is enough.
    for (const i of height === OPS_TOP || once ? fits : fits.filter((i) => i === widest))
      this.fit([this.data.texts[lane.name[i]]], this.x(lane.begin[i]), this.x(lane.end[i]), y + height / 2 + 0.5, ink);
    if (!fits.length && !once) {
      const from = Math.max(this.x(begin), GUTTER), to = Math.min(this.x(end), GUTTER + this.span);
      if (to - from < need) return;
      this.context.fillStyle = colour;
      const tall = Math.min(16, height);
      this.context.fillRect((from + to - need) / 2, y + (height - tall) / 2, need, tall);
      this.fit([name], from, to, y + height / 2 + 0.5, ink);
    }
  }

  memory(rank, y, height) {
    const { at, held } = this.timeline.memory[rank], c = this.context, highest = this.timeline.highest || 1;
    const level = (bytes) => y + height - (bytes / highest) * (height - 3);
    const first = Math.max(0, above(at, this.view.from) - 1), last = Math.min(at.length, above(at, this.view.to) + 1);
    c.beginPath();
    c.moveTo(this.x(at[first]), y + height);
    // Several steps on one pixel are drawn as their highest: a peak must not vanish.
    let pixel = -1, top = 0;
    for (let i = first; i < last; i++) {
      const x = this.x(at[i]), next = i + 1 < at.length ? this.x(at[i + 1]) : this.x(this.timeline.step);
      top = Math.floor(x) === pixel ? Math.max(top, held[i]) : held[i];
      pixel = Math.floor(x);
      if (i + 1 < last && Math.floor(next) === pixel) continue;
      c.lineTo(x, level(top));
      c.lineTo(x, level(held[i]));
      c.lineTo(next, level(held[i]));
    }
    c.lineTo(last < at.length ? this.x(at[last - 1]) : this.x(this.timeline.step), y + height);
    c.fillStyle = this.colours.memory;
    c.fill();
    c.strokeStyle = this.colours.memoryLine;
    c.lineWidth = 0.8;
    c.stroke();
    c.lineWidth = 1;
  }

  mark(lane, index, y, height) {
    const x = this.x(lane.begin[index]), width = Math.max(2, this.x(lane.end[index]) - x);
    this.context.strokeStyle = this.colours.mark;
    this.context.lineWidth = 2;
    this.context.strokeRect(x + 1, y + 1, width - 2, height - 2);
    this.context.lineWidth = 1;
  }

  end(step) {
    const x = Math.round(this.x(step)) + 0.5;
    if (x < GUTTER || x > this.width) return;
    this.context.strokeStyle = this.colours.ink;
    this.context.beginPath();
    this.context.moveTo(x, RULER);
    this.context.lineTo(x, this.height);
    this.context.stroke();
  }

  ruler() {
    const c = this.context, length = this.view.to - this.view.from, about = length / Math.max(2, Math.min(8, this.span / 65));
    const power = 10 ** Math.floor(Math.log10(about)), tick = power * [1, 2, 5, 10].find((k) => power * k >= about * 0.999);
    const [scale, unit] = this.view.to >= 1e6 && tick >= 1e4 ? [1e6, "s"] : this.view.to >= 1e3 && tick >= 10 ? [1e3, "ms"] : [1, "us"];
    c.textAlign = "center";
    for (let k = Math.ceil(this.view.from / tick); k * tick <= this.view.to; k++) {
      const x = Math.round(this.x(k * tick)) + 0.5, words = `${Number(((k * tick) / scale).toPrecision(9))} ${unit}`;
      c.strokeStyle = this.colours.grid;
      c.beginPath();
      c.moveTo(x, RULER - 5);
      c.lineTo(x, RULER);
      c.stroke();
      c.fillStyle = this.colours.quiet;
      const half = this.textWidth(words) / 2;
      c.fillText(words, Math.min(Math.max(x, GUTTER + half), this.width - half - 2), RULER / 2 - 1);
    }
  }
}
