// What is told of the thing under the pointer, or chosen by key: rows of [name, value], the first is the title.
"use strict";

const KIND = { simulated: "predicted", measured: "measured" };

function spanFacts(data, timeline, lane, i) {
  const name = data.texts[lane.name[i]], category = data.categories[lane.category[i]];
  const length = lane.end[i] - lane.begin[i], facts = [];
  const add = (what, value) => value !== "" && facts.push([what, value]);
  if (category === "exposed" || category === "bubble") {
    add(category === "exposed" ? "exposed communication" : "bubble", "");
    facts[0] = [category === "exposed" ? `exposed: waits for ${name}` : `bubble: ${name}`, ""];
  } else facts.push([lane.compute ? `${name} on ${timeline.names[lane.rank]}` : name, ""]);
  const run = lane.compute ? lane.runs[lane.run[i]] : undefined;
  if (run) {
    add("phase", MEANING[category]);
    add("microbatch", run.microbatches.filter((m) => m >= 0).join(", "));
    for (const other of data.timelines) if (other.took.has(name)) add(KIND[other.source] || other.source, timeText(other.took.get(name)));
    const window = data.windows.get(run.window);
    if (window) {
      let flops = 0;
      for (let k = window.first; k < window.first + window.count; k++) flops += data.ops.flops[k];
      add("ops", String(window.count));
      if (flops) add("work", `${flopsText(flops)}, ${flopsText((flops / run.compute) * 1e6)}/s`);
    }
    if (run.spans.length > 1) add("this piece", timeText(length));
    add("costs", data.source);
  } else if (lane.compute) add(KIND[timeline.source] || timeline.source, timeText(length));
  else {
    const key = travelKey(data, lane, i);
    for (const other of data.timelines) {
      const took = other === timeline ? length : other.travelled.get(key);
      if (took !== undefined) add(KIND[other.source] || other.source, timeText(took));
    }
  }
  add("from", timeText(lane.begin[i]));
  if (!lane.compute) {
    // A collective is named for its op, "tp all_reduce mm_3", or as its op, "dp unshard.0.0".
    const edge = /\be(\d+):/.exec(name);
    const op = [name.split(" ").pop(), name.replace(" ", ".")].find((one) => data.opNumber.has(one));
    if (edge && data.edges[edge[1]] !== undefined) add("tensor", data.texts[data.edges[edge[1]]]);
    else if (op !== undefined) add("tensor", data.texts[data.ops.makes[data.opNumber.get(op)]]);
    if (lane.bytes[i]) add("bytes", bytesText(lane.bytes[i]));
    if (lane.sender[i] >= 0) add("sent by", timeline.names[lane.sender[i]]);
    if (lane.sent[i] > 0) add("sent before", timeText(lane.sent[i] * data.tick_us));
    if (lane.bytes[i] && length > 0) add("rate", `${bytesText((lane.bytes[i] / length) * 1e6)}/s`);
  }
  return facts;
}

function opFacts(data, timeline, op, begin, end) {
  const { ops, texts, tick_us: tick } = data, facts = [[texts[ops.name[op]], ""]];
  const add = (what, value) => value !== "" && facts.push([what, value]);
  add("op", texts[ops.op[op]]);
  add("module", texts[ops.module[op]]);
  add("reads", texts[ops.reads[op]]);
  add("makes", texts[ops.makes[op]]);
  add("category", MEANING[data.categories[ops.category[op]]]);
  add("new bytes", bytesText(ops.bytes[op]));
  if (ops.flops[op]) add("work", flopsText(ops.flops[op]));
  add("predicted", `${timeText(ops.us[op] * tick)} (${data.source})`);
  add("here", `${timeText(end - begin)} from ${timeText(begin)}`);
  return facts;
}

function memoryFacts(data, timeline, rank, time) {
  const { at, held } = timeline.memory[rank], i = Math.max(0, above(at, time) - 1);
  const facts = [[`memory of ${timeline.names[rank]}`, ""], ["at", timeText(time)], ["in use", bytesText(held[i])]];
  if (timeline.peak[rank] !== undefined) facts.push(["peak", bytesText(timeline.peak[rank])]);
  return facts;
}
