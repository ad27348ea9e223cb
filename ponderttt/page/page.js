"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);

  // Light and dark: the system's choice until the button is used.
  const theme = byId("theme");
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const nameTheme = () => { theme.textContent = dark() ? "Light page" : "Dark page"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    nameTheme();
  });
  nameTheme();
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
  });

  const data = JSON.parse(byId("examples").textContent);
  if (!data.chunks.length) return;

  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const MIDDLE = 2047;
  const value = Object.fromEntries([...DIGITS].map((digit, i) => [digit, i]));
  const number = (digits, i) => 64 * value[digits[2 * i]] + value[digits[2 * i + 1]];

  // Tokens as text: each length is one digit, or more where the largest digit says so.
  function pieces(chunk) {
    const found = [];
    let start = 0, length = 0;
    for (const digit of chunk.lengths) {
      length += value[digit];
      if (value[digit] === 63) continue;
      found.push(chunk.text.slice(start, start + length));
      start += length;
      length = 0;
    }
    return found;
  }

  // What would be invisible or turn the text around is shown by name.
  const HIDDEN = /[\u0080-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
  function visible(text) {
    return text
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
      .replace(/\u007f/g, "\u2421")
      .replace(HIDDEN, (c) => `\u2039U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u203a`);
  }

  const fixed = (x, places) => {
    const text = x.toFixed(places);
    return Number(text) < 0 ? "\u2212" + text.slice(1) : text.replace("-", "");
  };
  const signed = (x, places) => (Number(x.toFixed(places)) > 0 ? "+" : "") + fixed(x, places);
  const add = (parent, tag, text, name) => {
    const child = document.createElement(tag);
    if (text !== undefined) child.textContent = text;
    if (name) child.className = name;
    parent.append(child);
    return child;
  };

  const list = byId("list"), code = byId("code"), about = byId("about"), readout = byId("readout");
  const fields = ["language", "decision", "oracle", "reference"].map((name) => byId(`f-${name}`));
  const wanted = () => Object.fromEntries(fields.map((field) => [field.id.slice(2), field.value]));
  let shown = [], current = 0, token = 1, spans = [];

  // Against the oracle a gate is right, misses an update, or makes a needless one.
  function verdict(chunk, reference) {
    const updated = chunk.decision !== "skip";
    if (updated === chunk.oracle[reference]) return "agrees";
    return updated ? "needless" : "missed";
  }
  const gain = (chunk, reference) => chunk.loss[reference] - chunk.loss.update;

  function filter() {
    const want = wanted();
    shown = data.chunks.filter((chunk) =>
      (!want.language || chunk.language === want.language) &&
      (!want.decision || chunk.decision === want.decision) &&
      (!want.oracle || verdict(chunk, want.reference) === want.oracle));
    list.replaceChildren();
    shown.forEach((chunk, i) => {
      const item = add(list, "li");
      item.id = `chunk-${i}`;
      item.setAttribute("role", "option");
      add(item, "span", visible(chunk.path), "file");
      const words = [chunk.language, chunk.decision, `${signed(gain(chunk, want.reference), 3)} nats`];
      add(item, "span", words.join(" \u00b7 "), "what");
      item.addEventListener("click", () => choose(i));
    });
    byId("shown").textContent = `${shown.length} of ${data.chunks.length} chunks`;
    choose(0);
  }

  function choose(i) {
    current = Math.max(0, Math.min(i, shown.length - 1));
    [...list.children].forEach((item, j) => item.setAttribute("aria-selected", String(j === current)));
    const item = list.children[current];
    if (item) {
      list.setAttribute("aria-activedescendant", item.id);
      const top = item.offsetTop - list.offsetTop;
      if (top < list.scrollTop) list.scrollTop = top;
      if (top + item.offsetHeight > list.scrollTop + list.clientHeight)
        list.scrollTop = top + item.offsetHeight - list.clientHeight;
    } else {
      list.removeAttribute("aria-activedescendant");
    }
    show(shown[current]);
  }

  function show(chunk) {
    about.replaceChildren();
    code.replaceChildren();
    code.scrollTop = 0;
    spans = [];
    if (!chunk) {
      add(about, "p", "No chunk fits these filters.");
      readout.textContent = "";
      return;
    }
    describe(chunk);
    const reference = wanted().reference;
    const gaps = chunk[`gap_${reference}`];
    pieces(chunk).forEach((piece, i) => {
      const saved = (number(gaps, i) - MIDDLE) * data.steps.gap;
      const depth = Math.min(5, Math.round(5 * Math.sqrt(Math.abs(saved) / data.deep)));
      const span = add(code, "span", visible(piece), depth ? `${saved > 0 ? "help" : "harm"} t${depth}` : "");
      span.dataset.token = i;
      spans.push(span);
    });
    point(Math.min(1, spans.length - 1));
  }

  function describe(chunk) {
    const reference = wanted().reference;
    add(about, "h3", visible(`${chunk.repo}: ${chunk.path}`));
    const words = {
      agrees: "as the oracle", missed: "the oracle updates it", needless: "the oracle skips it",
    }[verdict(chunk, reference)];
    const rows = add(about, "ul");
    const fact = (name, text) => {
      const item = add(rows, "li");
      add(item, "span", `${name} `);
      item.append(text);
    };
    fact("decision", `${chunk.decision}, ${words}`);
    fact("threshold", chunk.threshold === null ? "\u2013 (none yet)" : String(chunk.threshold));
    for (const arm of ["base", "skip", "update"]) fact(arm, fixed(chunk.loss[arm], 3));
    fact(`saved over ${reference}`, signed(gain(chunk, reference), 4));
    const signals = add(about, "ul");
    signals.setAttribute("aria-label", "Signals, with the share of the stream below");
    for (const [name, [size, below]] of Object.entries(chunk.signals)) {
      const item = add(signals, "li");
      item.title = `${below} % of the chunks of this language lie below`;
      add(item, "span", `${name} `);
      item.append(`${Number(size.toPrecision(3))} (${below} %)`);
    }
  }

  function point(i) {
    if (!spans.length) return;
    if (spans[token]) spans[token].classList.remove("here");
    token = Math.max(0, Math.min(i, spans.length - 1));
    spans[token].classList.add("here");
    tell(token);
    const box = spans[token].getBoundingClientRect(), frame = code.getBoundingClientRect();
    if (box.top < frame.top) code.scrollTop -= frame.top - box.top + 20;
    if (box.bottom > frame.bottom) code.scrollTop += box.bottom - frame.bottom + 20;
  }

  function tell(i) {
    const chunk = shown[current];
    readout.replaceChildren();
    add(readout, "span", `token ${i + 1} of ${spans.length} `);
    add(readout, "b", visible(pieces(chunk)[i]).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5"));
    const code0 = number(chunk.update, i);
    if (code0 === 0) {
      add(readout, "span", " \u2013 nothing predicts the first token");
      return;
    }
    const update = (code0 - 1) * data.steps.loss;
    const saved = (r) => (number(chunk[`gap_${r}`], i) - MIDDLE) * data.steps.gap;
    const losses = ["base", "skip"].map((r) => `${r} ${fixed(update + saved(r), 2)}`);
    add(readout, "div", `loss in nats: ${losses.join(", ")}, update ${fixed(update, 2)} \u00b7 ` +
      `UPDATE saved ${signed(saved("skip"), 3)} over skip, ${signed(saved("base"), 3)} over base`);
  }

  const chunkKeys = { j: 1, k: -1 };
  byId("explorer").addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const inCode = event.target === code;
    const moves = {
      ArrowDown: () => (inCode ? null : choose(current + 1)),
      ArrowUp: () => (inCode ? null : choose(current - 1)),
      ArrowRight: () => point(token + 1),
      ArrowLeft: () => point(token - 1),
      Home: () => (inCode ? point(0) : choose(0)),
      End: () => (inCode ? point(spans.length - 1) : choose(shown.length - 1)),
    };
    if (event.key in chunkKeys) choose(current + chunkKeys[event.key]);
    else if (!(event.key in moves) || moves[event.key]() === null) return;
    event.preventDefault();
  });
  code.addEventListener("click", (event) => {
    if (event.target.dataset.token) point(Number(event.target.dataset.token));
  });
  code.addEventListener("mouseover", (event) => {
    if (event.target.dataset.token) tell(Number(event.target.dataset.token));
  });
  code.addEventListener("mouseleave", () => spans.length && tell(token));
  for (const field of fields) field.addEventListener("change", filter);
  filter();
})();
