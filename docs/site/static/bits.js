// The page "Bits": two codes in the lanes of a word, a scale, an offset, and every step that decodes them.
"use strict";

(() => {
  const root = document.querySelector(".bits");
  const programs = JSON.parse(document.getElementById("bits-programs").textContent);
  const machine = bitsMachine(programs);
  const LANES = ["low lane", "high lane"];
  const PLACES = ["bits 15 to 0", "bits 31 to 16"];
  const FLIP = [{ transform: ["none", "rotateX(90deg) scale(1.1)", "none"] }, { duration: 350 }];
  const moving = matchMedia("(prefers-reduced-motion: no-preference)");
  const START = { format: "fp4", codes: [0b1011, 0b0110], scale: 0.3, offset: null };

  // ---- making elements ---------------------------------------------------------------------------------------------

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const binary = (number, width) => number.toString(2).padStart(width, "0");
  const hexadecimal = (number, width) => "0x" + number.toString(16).padStart(width, "0");

  /** Writes only what is new, so that nothing else moves. */
  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  /**
   * A row of squares, highest bit first. `kinds[i]` says how bit i looks; `toggle(i)` makes it a row of buttons, one of
   * which is reached by Tab, the others by arrow keys; 0 and 1 write a bit.
   */
  function squares(kinds, label, toggle) {
    const row = make("span", { className: "squares", role: toggle ? "group" : "img" });
    row.setAttribute("aria-label", label);
    const cells = kinds.map((kind, i) => {
      const cell = make(toggle && kind !== "blank" ? "button" : "span", { className: `square ${kind}` });
      if (cell.tagName === "BUTTON") {
        cell.type = "button";
        cell.addEventListener("click", () => toggle(i));
      }
      return cell;
    });
    row.append(...cells.toReversed());
    const buttons = cells.filter((cell) => cell.tagName === "BUTTON").toReversed();
    buttons.forEach((button, i) => (button.tabIndex = i === 0 ? 0 : -1));
    row.addEventListener("keydown", (event) => {
      const at = buttons.indexOf(document.activeElement);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
      if (event.key === "0" || event.key === "1") {
        if (buttons[at].textContent !== event.key) buttons[at].click();
      } else if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) {
        return;
      } else if (buttons[to]) {
        buttons[at].tabIndex = -1;
        buttons[to].tabIndex = 0;
        buttons[to].focus();
      }
      event.preventDefault();
    });

    function show(number, names = []) {
      cells.forEach((cell, i) => {
        const digit = String((number >>> i) & 1);
        if (moving.matches && cell.textContent !== "" && cell.textContent !== digit) cell.animate(...FLIP);
        write(cell, digit);
        cell.classList.toggle("one", digit === "1");
        if (cell.tagName === "BUTTON") {
          cell.setAttribute("aria-pressed", String(digit === "1"));
          cell.setAttribute("aria-label", `bit ${i}${names[i] ? ", " + names[i] : ""}`);
        }
      });
      if (!toggle) row.setAttribute("aria-label", `${label}: ${binary(number, cells.length)}`);
    }
    return { row, show };
  }

  /** The fields of a float, bit 0 first. */
  function floatKinds(kind) {
    const [sign, exponent, mantissa] = programs.floats[kind];
    return [...Array(mantissa).fill("mantissa"), ...Array(exponent).fill("exponent"), ...Array(sign).fill("sign")];
  }

  /** The fields of a code, bit 0 first; a whole number is coloured by its lane. */
  function codeKinds(element, lane) {
    const kinds = element.fields[0].flatMap(([name, bits]) => Array(bits.length).fill(name)).toReversed();
    return kinds.map((name) => (["sign", "exponent", "mantissa"].includes(name) ? name : `code-${lane}`));
  }

  const fieldNames = (element) =>
    element.fields[0].flatMap(([name, bits]) => Array(bits.length).fill(name)).toReversed();

  // ---- the state ---------------------------------------------------------------------------------------------------

  let state = START;
  let drawn = {}; // what was made for the format of the state, and how to bring it up to date
  let timer; // of writing the address

  function set(changes) {
    state = { ...state, ...changes };
    const { bits } = programs.elements[programs.formats[state.format].element];
    state.codes = state.codes.map((code) => code & (2 ** bits - 1));
    draw();
    clearTimeout(timer); // browsers refuse to change the address too often
    timer = setTimeout(() => history.replaceState(null, "", address()), 200);
  }

  /** The state, as the end of an address. */
  function address() {
    const { bits } = programs.elements[programs.formats[state.format].element];
    const codes = state.codes.map((code) => binary(code, bits));
    const offset = state.offset === null ? [] : [state.offset];
    return "#" + [state.format, ...codes, state.scale, ...offset].join("/");
  }

  /** The state that an address such as bits.html#q4_0/1011/0110/0.3 asks for. */
  function addressed() {
    const [format, low, high, scale, offset] = decodeURIComponent(location.hash.slice(1)).split("/");
    if (!(format in programs.formats)) return START;
    const code = (text, otherwise) => (/^[01]{1,8}$/.test(text) ? parseInt(text, 2) : otherwise);
    const number = (text, otherwise) => (text && Number.isFinite(Number(text)) ? Number(text) : otherwise);
    return {
      format,
      codes: [code(low, START.codes[0]), code(high, START.codes[1])],
      scale: number(scale, START.scale),
      offset: programs.formats[format].offset ? number(offset, null) : null,
    };
  }

  function flip(lane, bit) {
    set({ codes: state.codes.map((code, i) => (i === lane ? code ^ (1 << bit) : code)) });
  }

  // ---- what is drawn -----------------------------------------------------------------------------------------------

  function formatPicker() {
    const choices = Object.keys(programs.formats).map((name) => {
      const input = make("input", { type: "radio", name: "format", value: name, checked: name === state.format });
      input.addEventListener("change", () => set({ format: name, offset: null }));
      return make("label", { className: "choice" }, input, make("span", {}, name));
    });
    return make("fieldset", { className: "formats" }, make("legend", {}, "Format"), ...choices);
  }

  /** The panel of one lane: its code, the fields of the code, and the value that comes of it. */
  function lanePanel(lane, format, element) {
    const names = fieldNames(element);
    const code = squares(codeKinds(element, lane), `code of the ${LANES[lane]}`, (bit) => flip(lane, bit));
    const title = make("span", { className: "code-text" });
    const rows = element.fields[0].map(() => ["th", "td", "td"].map((tag) => make(tag)));
    const value = make("p", { className: "value", role: "status" });
    const command = make("code", { className: "command" });
    const panel = make(
      "section",
      { className: `panel lane-${lane}` },
      make("h3", {}, `${lane ? "High" : "Low"} lane`, make("small", {}, PLACES[lane])),
      make("div", { className: "code big" }, code.row, title),
      make("table", { className: "fields" }, make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells)))),
      value,
      command,
    );
    function show(group) {
      const number = state.codes[lane];
      code.show(number, names);
      write(title, `code ${number} = 0b${binary(number, element.bits)}`);
      element.fields[number].forEach((texts, i) => texts.forEach((text, j) => write(rows[i][j], text)));
      value.hidden = "refused" in group;
      if (!value.hidden) {
        const left = machine.fill(format.formula, { ...group, value: element.values[number] ?? NaN });
        const result = machine.general(machine.decode(element.values[number] ?? NaN, group), 9);
        value.replaceChildren(left, " = ", make("strong", {}, result));
      }
      const offset = state.offset === null ? "" : ` --offset ${state.offset}`;
      write(command, `billfish explain ${state.format} 0b${binary(number, element.bits)} --scale ${state.scale}${offset}`);
    }
    return { panel, show };
  }

  /** A number to type, or to click bit by bit as it is stored: `read` gives it, `change` takes another one. */
  function numberPanel(name, kind, { read, stored, meant, change }) {
    const input = make("input", { type: "text", inputMode: "decimal", id: `bits-${name}`, autocomplete: "off" });
    input.addEventListener("input", () => {
      if (input.value.trim() !== "" && !Number.isNaN(Number(input.value))) change(Number(input.value));
    });
    input.addEventListener("blur", () => (input.value = String(read())));
    const kinds = floatKinds(kind);
    const held = squares(kinds, `${name}, stored as ${kind}`, (bit) => change(meant(stored(read()) ^ (1 << bit))));
    const label = make("label", { htmlFor: input.id }, name);
    const panel = make("div", { className: "number" }, label, input, held.row);
    function show() {
      if (document.activeElement !== input) input.value = String(read());
      held.show(stored(read()), kinds);
    }
    return { panel, show };
  }

  /** The scale, the offset of a format that has one, and what is held of them. */
  function groupPanel(format) {
    const numbers = [
      numberPanel("scale", format.scale, {
        read: () => state.scale,
        stored: (scale) => machine.storedScale(format, scale),
        meant: (bits) => machine.scaleOf(format, bits),
        change: (scale) => set({ scale }),
      }),
    ];
    if (format.offset) {
      numbers.push(
        numberPanel("offset", "float16", {
          read: () => state.offset ?? format.offset.default,
          stored: (offset) => machine.toBits("float16", machine.round("float16", offset)),
          meant: (bits) => machine.fromBits("float16", bits),
          change: (offset) => set({ offset }),
        }),
      );
    }
    const note = make("p", { className: "held", role: "status" });
    const panel = make("section", { className: "panel group" }, ...numbers.map((number) => number.panel), note);
    function show(group) {
      numbers.forEach((number) => number.show());
      note.classList.toggle("refused", "refused" in group);
      write(note, group.refused ?? machine.fill(format.held, group));
    }
    return { panel, show };
  }

  /** One way to decode: a row for each step. */
  function walkCard(walk, element) {
    const origins = machine.origins(walk, element.bits);
    const rows = walk.steps.map((step, i) => stepRow(step, origins[i], element));
    const why = make("details", {}, make("summary", {}, "Why it works"), make("pre", {}, walk.why));
    why.append(make("p", {}, "From ", make("code", {}, walk.trick), " in ", sourceLink()));
    const names = LANES.map((name, lane) => make("span", {}, `${name}, ${PLACES[lane]}`)).toReversed();
    const head = make("li", { className: "step head" }, make("span"), make("div", { className: "lanes" }, ...names));
    head.ariaHidden = "true"; // each row of bits says its lane
    const list = make("ol", { className: "steps" }, head, ...rows.map((row) => row.item));
    const card = make("section", { className: "walk" }, make("h3", {}, walk.title), list, why);
    return { card, show: () => machine.run(walk, state.codes).forEach((done, i) => rows[i].show(done)) };
  }

  const sourceLink = () => make("a", { href: "source/billfish/core/bits.py.html" }, "billfish/core/bits.py");

  function stepRow(step, origins, element) {
    const float = step.float && floatKinds(step.float);
    const lanes = [0, 1].map((lane) => {
      const names = codeKinds(element, lane);
      const kinds = origins.slice(16 * lane, 16 * lane + 16).map((origin, i) => {
        const from = typeof origin === "number" ? names[origin] : origin ?? "blank";
        return float ? float[i] + (typeof origin === "number" ? " from-code" : "") : from;
      });
      const toggle = step.kind === "start" ? (i) => flip(lane, i - step.operands[1]) : null;
      return squares(kinds, `${step.name}, ${LANES[lane]}`, toggle);
    });
    const text = step.kind === "start" ? `${step.name}   ${step.text}` : `${step.name} = ${step.text}`;
    const word = make("code", { className: "word" });
    const values = lanes.map(() => make("output", { className: "lane-value" }));
    const boxes = lanes.map((lane, i) => make("div", { className: "lane" }, lane.row, ...(float ? [values[i]] : [])));
    const item = make(
      "li",
      { className: `step ${step.kind}` },
      make("code", { className: "operation" }, text),
      word,
      make("div", { className: "lanes" }, ...boxes.toReversed()),
    );
    function show(done) {
      write(word, hexadecimal(done.word, 8));
      lanes.forEach((lane, i) => lane.show((done.word >>> (16 * i)) & 0xffff, []));
      if (float) values.forEach((value, i) => write(value, machine.general(done.lanes[i])));
    }
    return { item, show };
  }

  /** An element without arithmetic: its table, with the two codes marked. */
  function tableCard(element) {
    const cells = element.values.map((value, code) => {
      const marks = make("small", {}, binary(code, element.bits));
      return make("li", {}, marks, make("span", {}, machine.general(value)));
    });
    const list = make("ol", { className: "table-values" }, ...cells);
    const card = make("section", { className: "walk" }, make("h3", {}, "A table: the code is an index"), list);
    function show() {
      cells.forEach((cell, code) => {
        [0, 1].forEach((lane) => cell.classList.toggle(`code-${lane}`, state.codes[lane] === code));
      });
    }
    return { card, show };
  }

  /** What colours mean, of those that the parts of the page have. */
  function legend(parts) {
    const meanings = {
      "sign": "sign",
      "exponent": "exponent",
      "mantissa": "mantissa",
      "code-1": "code of the high lane",
      "code-0": "code of the low lane",
      "constant": "written by a constant",
      "mantissa from-code": "a bit of the code, read as part of a float",
    };
    const shown = Object.entries(meanings).filter(([kind]) => {
      const selector = ".square." + kind.replace(" ", ".");
      return parts.some((part) => part.querySelector(selector));
    });
    const items = shown.map(([kind, text]) => make("li", {}, make("span", { className: `square one ${kind}` }), text));
    return make("ul", { className: "legend" }, ...items);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  function build(name) {
    const format = programs.formats[name];
    const element = programs.elements[format.element];
    const group = groupPanel(format);
    const lanes = [0, 1].map((lane) => lanePanel(lane, format, element));
    const cards = element.walks.map((walk) => walkCard(walk, element));
    if (!cards.length) cards.push(tableCard(element));
    const panels = make("div", { className: "panels" }, ...lanes.toReversed().map((lane) => lane.panel), group.panel);
    const walks = cards.map((card) => card.card);
    const title = make("p", { className: "made-of" }, make("strong", {}, name), ` ${format.made_of}`);
    content.replaceChildren(title, panels, legend([panels, ...walks]), ...walks);
    return { name, format, shows: [group, ...lanes, ...cards].map((part) => part.show) };
  }

  function draw() {
    if (drawn.name !== state.format) drawn = build(state.format);
    const offset = state.offset ?? drawn.format.offset?.default;
    const group = machine.group(drawn.format, state.scale, offset);
    drawn.shows.forEach((show) => show(group));
    picker.querySelector(`[value="${state.format}"]`).checked = true;
  }

  const picker = formatPicker();
  const content = make("div", { className: "content-of-format" });
  root.replaceChildren(picker, content);
  root.show = set; // for tests, and for whoever plays with the page in a console
  window.addEventListener("hashchange", () => location.hash !== address() && set(addressed()));
  set(addressed());
})();
