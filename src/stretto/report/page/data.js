// The drawing's data: unpacks what `stretto.report.pack` wrote, and answers what lies where. Draws nothing.
"use strict";

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return decoded(JSON.parse(await new Response(stream).text()));
}

// Ticks to microseconds, differences to times; spans of a lane stay columns, as there may be very many.
function decoded(data) {
  data.longest = Math.max(1e-3, ...data.timelines.map((timeline) => timeline.step * data.tick_us));
  for (const timeline of data.timelines) {
    timeline.step *= data.tick_us;
    timeline.took = new Map();
    timeline.travelled = new Map();
    for (const lane of timeline.lanes) decodeLane(lane, data, timeline);
    timeline.memory = timeline.memory.map(([times, bytes]) => {
      let at = 0, held = 0;
      return { at: times.map((d) => (at += d) * data.tick_us), held: bytes.map((d) => (held += d)) };
    });
    timeline.highest = Math.max(0, ...timeline.memory.flatMap((m) => m.held.reduce((a, b) => Math.max(a, b), 0)));
  }
  data.windows = decodeWindows(data);
  return data;
}

function decodeLane(lane, data, timeline) {
  const n = lane.count;
  const column = (name, otherwise) => lane[name] || new Int8Array(n).fill(otherwise);
  const begin = new Float64Array(n), end = new Float64Array(n);
  const started = column("start", 0), took = column("took", 0);
  let at = 0;
  lane.longest = 0;
  for (let i = 0; i < n; i++) {
    begin[i] = (at + started[i]) * data.tick_us;
    at += started[i] + took[i];
    end[i] = at * data.tick_us;
    lane.longest = Math.max(lane.longest, end[i] - begin[i]);
  }
  Object.assign(lane, {
    begin, end, category: column("category", 0), name: column("name", 0), microbatch: column("microbatch", -1),
    run: column("run", -1), bytes: column("bytes", 0), sender: column("sender", -1), sent: column("sent", 0),
  });
  lane.compute = lane.row === "compute";
  if (!lane.compute) {
    for (let i = 0; i < n; i++) timeline.travelled.set(travelKey(data, lane, i), end[i] - begin[i]);
    return;
  }
  lane.runs = timeline.runs[lane.rank].map(([window, ...microbatches]) => ({ window, microbatches, spans: [], compute: 0 }));
  for (let i = 0; i < n; i++) {
    const run = lane.runs[lane.run[i]];
    if (!run) continue;
    run.spans.push(i);
    run.compute += end[i] - begin[i];
    const name = data.texts[lane.name[i]];
    timeline.took.set(name, (timeline.took.get(name) || 0) + end[i] - begin[i]);
  }
}

// What a message or a collective is called in every timeline of one plan.
const travelKey = (data, lane, i) => `${lane.rank} ${data.texts[lane.name[i]]} ${lane.microbatch[i]}`;

// A window's ops with the predicted time of those before each.
function decodeWindows(data) {
  const windows = new Map(), ops = data.ops;
  for (const [name, [first, count]] of Object.entries(ops.windows || {})) {
    const before = new Float64Array(count + 1);
    for (let k = 0; k < count; k++) before[k + 1] = before[k] + ops.us[first + k];
    windows.set(name, { first, count, before });
  }
  return windows;
}

// The first index whose value is above `limit`, in an ascending column.
function above(column, limit) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

// Indices of a lane's spans that touch [from, to]; messages may overlap, so the search begins one longest before.
function touching(lane, from, to) {
  return [above(lane.begin, from - lane.longest - 1e-9), above(lane.begin, to)];
}

// The span nearest to a time, within `slack` microseconds; the latest that holds it wins.
function spanAt(lane, time, slack) {
  const [first, last] = touching(lane, time - slack, time + slack);
  let best = -1, distance = slack;
  for (let i = last - 1; i >= first; i--) {
    const off = Math.max(lane.begin[i] - time, time - lane.end[i], 0);
    if (off < distance || (off === 0 && best < 0)) { best = i; distance = off; }
    if (off === 0) break;
  }
  return best;
}

// Ops of a run laid over its compute spans: calls each(op number, begin, end) for those that touch [from, to].
function eachOp(data, timeline, lane, run, from, to, each) {
  const window = data.windows.get(run.window);
  if (!window || !window.count || !run.compute) return;
  const before = window.before, scale = before[window.count] / run.compute;
  let done = 0;
  for (const i of run.spans) {
    const begin = lane.begin[i], length = lane.end[i] - begin;
    if (begin > to) return;
    if (lane.end[i] >= from) {
      const low = done + Math.max(0, from - begin), high = done + Math.min(length, to - begin);
      for (let k = Math.max(0, above(before, low * scale) - 1); k < window.count && before[k] / scale < high; k++) {
        const start = Math.max(before[k] / scale, done), stop = Math.min(before[k + 1] / scale, done + length);
        if (stop - start > 1e-9 * run.compute) each(window.first + k, begin + start - done, begin + stop - done);
      }
    }
    done += length;
  }
}

// Time, bytes and work for people.
function timeText(us) {
  const size = Math.abs(us);
  const [scale, unit] = size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : [1, "us"];
  return `${Number((us / scale).toPrecision(4))} ${unit}`;
}

function bytesText(bytes) {
  let size = bytes;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(size) < 1023.5) return `${Number(size.toPrecision(size >= 1000 ? 4 : 3))} ${unit}`;
    size /= 1024;
  }
  return `${Number(size.toPrecision(4))} GiB`;
}

function flopsText(flops) {
  const [scale, unit] = flops >= 1e12 ? [1e12, "TFLOP"] : flops >= 1e9 ? [1e9, "GFLOP"] : flops >= 1e6 ? [1e6, "MFLOP"] : [1, "FLOP"];
  return `${Number((flops / scale).toPrecision(3))} ${unit}`;
}
