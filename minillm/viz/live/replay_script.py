"""The JavaScript and CSS of `ReplayWidget`.

The script is a function of the name of its place, the element with the still picture, and of the recording; it
replaces the picture by the player. All frames are in the recording, so scrubbing needs no kernel.

JupyterLab runs a script where it is. VS Code runs a copy at the end of the whole output, and the classic notebook one
in the head of the page, so there the place is found by its name. A place that has its player has no script any more:
one output may be shown several times.
"""

from __future__ import annotations

SCRIPT = r"""
(name, recording) => {
  const selector = `[data-replay="${name}"]`;
  const place = document.currentScript.closest(selector)
    || [...document.querySelectorAll(selector)].find(found => found.querySelector("script"));
  if (!place) return;  // the still picture stays
  const SPEEDS = [0.5, 1, 2, 4, 8];

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function button(testid, label, sign) {
    return make("button", {type: "button", "data-testid": testid, "aria-label": label, title: label}, sign);
  }

  // Ids must be unique in the page, and one output may be shown twice.
  window.minillmReplays = (window.minillmReplays || 0) + 1;
  const own = `replay-${window.minillmReplays}`;
  const unpack = ({parts, runs}, index) =>
    runs[index].map(([first, count]) => parts.slice(first, first + count).join("")).join("");

  const steps = recording.steps, last = steps.length - 1;
  const speeds = [...new Set([...SPEEDS, recording.speed])].sort((a, b) => a - b);
  let shown = -1, timer = null, describing = false;

  const first = button("replay-first", "First step (Home)", "|◀");
  const back = button("replay-back", "One step back (Left)", "◀");
  const play = button("replay-play", "Play (Space)", "▶ Play");
  const forward = button("replay-forward", "One step on (Right)", "▶");
  const end = button("replay-last", "Last step (End)", "▶|");
  const slider = make("input", {type: "range", min: 0, max: Math.max(last, 0), step: 1, "data-testid": "replay-slider",
    "aria-label": "Step"});
  const speed = make("select", {"data-testid": "replay-speed", "aria-label": "Speed"},
    ...speeds.map(s => make("option", {value: s}, `${s} frames/s`)));
  const count = make("output", {"data-testid": "replay-count", "aria-live": "polite"});
  const describe = make("button", {type: "button", "data-testid": "replay-describe", "aria-pressed": "false"},
    "Describe as text");
  const stage = make("div", {"data-testid": "replay-frame", class: "minillm-replay-frame"});
  const words = make("pre", {"data-testid": "replay-text", class: "minillm-replay-text", hidden: ""});
  const note = make("span", {"data-testid": "replay-note", class: "minillm-replay-note"}, recording.note);
  const bar = make("div", {class: "minillm-replay-bar", role: "toolbar", "aria-label": "Replay controls"},
    first, back, play, forward, end, slider, count, speed, describe);
  // In command mode the arrow keys are JupyterLab's: newer ones ask for handled events, older ones for the attribute.
  const root = make("div", {class: "minillm-replay", role: "group", tabindex: "0", "data-testid": "replay",
    "data-lm-suppress-shortcuts": "true",
    "aria-label": `Replay of ${recording.name}. Arrow keys step, Space plays and pauses, Home and End jump.`},
    bar, note, stage, words);
  speed.value = String(recording.speed);

  function show(index) {
    index = Math.min(Math.max(index, 0), last);
    if (index === shown || last < 0) return;
    shown = index;
    stage.innerHTML = unpack(recording.frames, index).replaceAll("\ue000", `${own}-`);
    words.textContent = unpack(recording.texts, index);
    slider.value = String(index);
    slider.setAttribute("aria-valuetext", `step ${steps[index]}`);
    count.textContent = `step ${steps[index]} of ${steps[last]}`;
    root.dataset.step = String(steps[index]);
    const atFirst = index === 0, atLast = index === last;
    for (const [node, off] of [[first, atFirst], [back, atFirst], [forward, atLast], [end, atLast]]) {
      // A disabled button has no focus, and then no key arrives here.
      if (off && node === document.activeElement) root.focus({preventScroll: true});
      node.disabled = off;
    }
  }
  function namePlay(label, sign) {
    play.textContent = sign;
    play.title = label;
    play.setAttribute("aria-label", label);
  }
  function pause() {
    if (timer !== null) clearTimeout(timer);
    timer = null;
    namePlay("Play (Space)", "▶ Play");
    root.dataset.state = "paused";
    count.setAttribute("aria-live", "polite");
  }
  function tick() {
    timer = setTimeout(() => {
      if (!root.isConnected) return pause();  // the output was removed
      if (shown + 1 === last) pause();  // before the last step is shown, so that a screen reader says it
      show(shown + 1);
      if (shown < last) tick();
    }, 1000 / Number(speed.value));
  }
  function start() {
    if (last < 1) return;
    count.setAttribute("aria-live", "off");
    namePlay("Pause (Space)", "❚❚ Pause");
    root.dataset.state = "playing";
    tick();
    if (shown === last) show(0);
  }
  const toggle = () => (timer === null ? start() : pause());
  const go = index => { if (timer !== null) pause(); show(index); };

  first.onclick = () => go(0);
  back.onclick = () => go(shown - 1);
  play.onclick = toggle;
  forward.onclick = () => go(shown + 1);
  end.onclick = () => go(last);
  slider.oninput = () => go(Number(slider.value));
  describe.onclick = () => {
    describing = !describing;
    words.hidden = !describing;
    describe.setAttribute("aria-pressed", String(describing));
  };
  root.addEventListener("keydown", event => {
    if (event.target === speed || event.altKey || event.ctrlKey || event.metaKey) return;
    const acts = {
      ArrowLeft: () => go(shown - 1), ArrowRight: () => go(shown + 1), Home: () => go(0), End: () => go(last),
    };
    if (!event.target.closest("button")) acts[" "] = toggle;
    if (!acts[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  });

  place.replaceChildren(...place.querySelectorAll("style"), root);
  root.dataset.state = "paused";
  show(recording.start);
  const still = window.matchMedia && window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (recording.autoplay && !still && last > 0) {
    // Nothing is missed: it starts when most of the picture is in view, unless the reader was quicker.
    const watcher = new IntersectionObserver(seen => {
      if (!seen.some(entry => entry.isIntersecting)) return;
      watcher.disconnect();
      if (timer === null && shown === recording.start) { show(0); start(); }
    }, {threshold: 0.4});
    watcher.observe(stage);
  }
}
"""

STYLE = """
.minillm-replay { max-width: 980px; padding: 2px; border-radius: 6px; }
.minillm-replay:focus-visible, .minillm-replay button:focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
.minillm-replay-bar { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-bottom: 6px; }
.minillm-replay-bar button, .minillm-replay-bar select { font: inherit; font-size: 13px; padding: 3px 9px;
  color: #1f2430; background: #ffffff; border: 1px solid #b9bfca; border-radius: 5px; cursor: pointer; }
.minillm-replay-bar button:disabled { color: #9aa1ac; cursor: default; }
.minillm-replay-bar button[aria-pressed="true"] { background: #1f2430; color: #ffffff; }
.minillm-replay-bar [data-testid="replay-play"] { min-width: 84px; }
.minillm-replay-bar input { flex: 1 1 140px; min-width: 100px; accent-color: #0072B2; }
.minillm-replay-bar output { min-width: 108px; font-size: 13px; font-variant-numeric: tabular-nums;
  color: var(--jp-ui-font-color1, inherit); }
.minillm-replay-note { display: block; font-size: 12px; margin-bottom: 6px; color: var(--jp-ui-font-color2, inherit); }
.minillm-replay-note:empty { display: none; }
.minillm-replay-frame svg { display: block; max-width: 100%; height: auto; margin-bottom: 10px; }
.minillm-replay-text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; padding: 10px 14px;
  margin: 0; color: #1f2430;  background: #ffffff; border: 1px solid #d5d9e0; border-radius: 10px; }
"""
