// Works the report's page as a reader would, by events alone, and writes what came of it into the page.
(async () => {
  const found = {}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const page = document.documentElement, tip = document.getElementById("tip"), status = document.getElementById("status");
  const out = document.createElement("pre");
  out.id = "outcome";
  try {
    for (let k = 0; k < 200 && !page.dataset.ready; k++) await wait(20);
    await wait(100);
    found.ready = page.dataset.ready;
    found.status = status.textContent;
    found.overflow = page.scrollWidth - innerWidth;
    const canvases = [...document.querySelectorAll(".lanes canvas")], canvas = canvases[0];
    found.panels = canvases.length;
    found.widths = canvases.map((c) => c.clientWidth);
    found.legend = [...document.querySelectorAll("#legend span")].map((e) => e.dataset.category);
    found.drawn = canvases.map((c) => [Number(c.dataset.spans), Number(c.dataset.ops)]);
    const shown = () => status.textContent.replace(/.*Shown: /, "");
    const point = (type, x, y, more = {}) => {
      const box = canvas.getBoundingClientRect();
      const event = new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, ...more });
      canvas.dispatchEvent(event);
      return wait(60);
    };
    const told = () => (tip.style.display === "block" ? tip.innerText : "");
    const key = (name) => { canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true })); return wait(60); };
    const middle = 24 + 4 + 15; // of rank 0's compute lane: below the ruler
    found.whole = shown();

    await point("pointermove", 100, middle);
    found.hovered = told();
    await point("pointermove", 20, middle);
    found.hoveredLabel = told();

    document.querySelector('button[data-do="in"]').click();
    await wait(60);
    found.button = shown();
    document.querySelector('button[data-do="fit"]').click();
    await wait(60);
    found.fitted = shown();

    const turn = (more) => canvas.dispatchEvent(new WheelEvent("wheel", {
      deltaY: -400, clientX: canvas.getBoundingClientRect().left + 96, bubbles: true, cancelable: true, ...more }));
    found.scrollsPage = turn({});
    await wait(60);
    found.wheelAlone = shown();
    turn({ ctrlKey: true });
    await wait(60);
    found.wheel = shown();
    await key("0");
    canvas.focus();
    turn({});
    await wait(60);
    found.wheelFocused = shown();
    await key("0");

    await key("+");
    found.keyIn = shown();
    await key("ArrowRight");
    found.keyRight = shown();
    await key("0");
    await key(".");
    found.chosen = told();
    await key("Enter");
    found.framed = shown();
    found.ops = Number(canvas.dataset.ops);
    await key("Escape");
    await point("pointermove", 400, 24 + 4 + 24);
    found.op = told();
    await point("pointermove", 400, 24 + 4 + 6);
    found.action = told();
    await key("0");

    await point("pointerdown", 200, middle, { button: 0 });
    await point("pointermove", 500, middle);
    await point("pointerup", 500, middle);
    found.dragged = shown();
    await point("pointerdown", 500, middle, { button: 0, shiftKey: true });
    await point("pointermove", 400, middle, { shiftKey: true });
    await point("pointerup", 400, middle, { shiftKey: true });
    found.moved = shown();
    await wait(500);
    found.hash = location.hash;
    await key("Home");
    await key("0");
    await key(".");
    await key("ArrowDown");
    found.travelled = told();
    await key("Escape");

    const box = document.querySelector('input[data-show="messages"]'), before = canvas.clientHeight;
    box.click();
    await wait(60);
    found.lower = before - canvas.clientHeight;
  } catch (error) {
    found.error = `${error}`;
  }
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
