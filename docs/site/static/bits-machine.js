// Runs the programs of billfish/core/bits.py: 32-bit words, two 16-bit lanes, each operation rounded as in Python.
// No page is needed for any of this; bits.js draws it.
"use strict";

const bitsMachine = (programs) => {
  const view = new DataView(new ArrayBuffer(8));

  // ---- floats of 8 to 32 bits ---------------------------------------------------------------------------------------

  /** Bits of exponent and mantissa, and the bias of the exponent. */
  function layout(kind) {
    const [, exponent, mantissa] = programs.floats[kind];
    return { exponent, mantissa, bias: 2 ** (exponent - 1) - 1 };
  }

  /** e where 2^e <= |x| < 2^(e + 1); less than any that matters for 0. */
  function exponentOf(x) {
    view.setFloat64(0, x);
    return ((view.getUint32(0) >>> 20) & 0x7ff) - 1023;
  }

  function roundToEven(x) {
    const up = Math.round(x); // ties go up
    return up - x === 0.5 && up % 2 !== 0 ? up - 1 : up;
  }

  /** The nearest float of a kind, ties to even: rounded once, from a double. */
  function round(kind, x) {
    if (x === 0 || !Number.isFinite(x)) return x;
    const { mantissa, bias } = layout(kind);
    const step = 2 ** (Math.max(exponentOf(x), 1 - bias) - mantissa);
    const rounded = roundToEven(x / step) * step;
    return Math.abs(rounded) < 2 ** (bias + 1) ? rounded : Math.sign(x) * Infinity;
  }

  function toBits(kind, x) {
    const { exponent, mantissa, bias } = layout(kind);
    const sign = x < 0 || Object.is(x, -0) ? 1 : 0;
    const top = (sign << (exponent + mantissa)) >>> 0;
    if (!Number.isFinite(x)) return top | ((2 ** exponent - 1) << mantissa) | (Number.isNaN(x) ? 1 << (mantissa - 1) : 0);
    const power = Math.max(exponentOf(x), 1 - bias);
    const significand = Math.abs(x) / 2 ** (power - mantissa);
    const normal = significand >= 2 ** mantissa;
    return top | ((normal ? power + bias : 0) << mantissa) | (normal ? significand - 2 ** mantissa : significand);
  }

  function fromBits(kind, bits) {
    const { exponent, mantissa, bias } = layout(kind);
    const sign = (bits >>> (exponent + mantissa)) & 1 ? -1 : 1;
    const power = (bits >>> mantissa) & (2 ** exponent - 1);
    const fraction = bits & (2 ** mantissa - 1);
    if (power === 2 ** exponent - 1) return fraction ? NaN : sign * Infinity;
    if (power === 0) return sign * fraction * 2 ** (1 - bias - mantissa);
    return sign * (fraction + 2 ** mantissa) * 2 ** (power - bias - mantissa);
  }

  // ---- programs ----------------------------------------------------------------------------------------------------

  const onWords = {
    and: (word, mask) => word & mask,
    xor: (word, mask) => word ^ mask,
    or: (word, mask) => word | mask,
    join: (word, other) => word | other,
    shift: (word, count) => word >>> count,
  };
  // As NumPy and ml_dtypes: in float32, then rounded to 16 bits.
  const onLanes = {
    multiply: (x, factor) => Math.fround(x * factor),
    subtract: (x, amount) => Math.fround(x - amount),
    multiply_add: (x, factor, amount) => Math.fround(Math.fround(x * factor) + amount),
  };

  /** The steps of a walk for two codes: of each the word, and its lanes, low lane first, once they are floats. */
  function run(walk, codes) {
    const done = {};
    return walk.steps.map((step) => {
      const [first, ...others] = step.operands;
      let word, lanes;
      if (step.kind === "start") {
        word = ((codes[1] << 16) | codes[0]) << others[0];
      } else if (step.kind in onWords) {
        const operand = step.kind === "join" ? done[others[0]].word : others[0];
        word = onWords[step.kind](done[first].word, operand);
      } else {
        lanes = done[first].lanes.map((x) => round(step.float, onLanes[step.kind](x, ...others)));
        word = (toBits(step.float, lanes[1]) << 16) | toBits(step.float, lanes[0]);
      }
      word >>>= 0;
      if (step.float && !lanes) lanes = [word & 0xffff, word >>> 16].map((bits) => fromBits(step.float, bits));
      done[step.name] = { word, lanes };
      return done[step.name];
    });
  }

  /** For each step, where its 32 bits come from, bit 0 first: the number of a bit of the code, "constant" or null. */
  function origins(walk, bits) {
    const done = {};
    const bit = (mask, i) => (mask >>> i) & 1;
    return walk.steps.map((step) => {
      const [first, operand] = step.operands;
      const from = done[first];
      const places = [...Array(32).keys()];
      const rules = {
        start: (i) => (i % 16 >= operand && i % 16 < operand + bits ? (i % 16) - operand : null),
        and: (i) => (bit(operand, i) ? from[i] : null),
        xor: (i) => from[i],
        or: (i) => (bit(operand, i) ? "constant" : from[i]),
        join: (i) => from[i] ?? done[operand][i],
        shift: (i) => from[i + operand] ?? null,
      };
      done[step.name] = step.kind in rules ? places.map(rules[step.kind]) : places.map(() => null);
      return done[step.name];
    });
  }

  // ---- scales, offsets and values ----------------------------------------------------------------------------------

  /** The place of a float32 among all float32, as in bits_programs.py. */
  function place(x) {
    view.setFloat32(0, x);
    const bits = view.getUint32(0);
    return bits < 0x80000000 ? bits : -1 - (bits - 0x80000000);
  }

  /** The bits that a format stores for a scale. */
  function storedScale(format, scale) {
    if (!format.held_scales) return toBits(format.scale, round(format.scale, scale));
    const { starts, bytes } = programs.bytes[format.scale];
    const at = place(Math.fround(scale));
    return bytes[starts.findLastIndex((start) => start <= at)];
  }

  /** The scale to ask for, so that a format stores these bits. */
  function scaleOf(format, bits) {
    return format.held_scales ? programs.bytes[format.scale].meant[bits] ?? NaN : fromBits(format.scale, bits);
  }

  /** What a format makes of a scale and an offset: the numbers of a group, or why they are refused. */
  function group(format, scale, offset) {
    const stored = storedScale(format, scale);
    const meant = format.held_scales ? scaleOf(format, stored) : scale;
    const held = format.held_scales ? format.held_scales[stored] ?? NaN : fromBits(format.scale, stored);
    const negative = (x) => x < 0 || Object.is(x, -0);
    if (![held, meant].every(Number.isFinite) || negative(held) !== negative(scale)) {
      return { refused: fill(format.refused_scale, { asked: scale }) };
    }
    const numbers = { asked: scale, scale: held };
    if (format.offset) {
      const number = round("float16", format.offset.role === "minimum" ? offset || 0 : offset);
      if (!Number.isFinite(number)) return { refused: fill(format.refused_offset, { asked: offset }) };
      numbers[format.offset.role] = number;
    }
    return numbers;
  }

  /** (value - zero) * scale + minimum, each operation rounded to float32. */
  function decode(value, { zero, scale, minimum }) {
    let x = Math.fround(value);
    if (zero !== undefined) x = Math.fround(x - zero);
    x = Math.fround(x * scale);
    return minimum === undefined ? x : Math.fround(x + minimum);
  }

  // ---- text --------------------------------------------------------------------------------------------------------

  /** Python's format(x, ".{digits}g"). JavaScript rounds ties up, Python to even. */
  function general(x, digits = 6) {
    if (Number.isNaN(x)) return "nan";
    const sign = x < 0 || Object.is(x, -0) ? "-" : "";
    if (!Number.isFinite(x)) return sign + "inf";
    if (x === 0) return sign + "0";
    const parts = (count) => Math.abs(x).toExponential(count - 1).split("e");
    const [exactly, down] = parts(digits + 50);
    const all = exactly.replace(".", "");
    const tie = /^50*$/.test(all.slice(digits)) && all[digits - 1] % 2 === 0;
    const [nearest, up] = parts(digits);
    const shown = (tie ? all.slice(0, digits) : nearest.replace(".", "")).replace(/0+$/, "");
    const exponent = Number(tie ? down : up);
    if (exponent < -4 || exponent >= digits) {
      const point = shown.length > 1 ? shown[0] + "." + shown.slice(1) : shown;
      return `${sign}${point}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
    }
    if (exponent < 0) return `${sign}0.${"0".repeat(-1 - exponent)}${shown}`;
    const whole = shown.slice(0, exponent + 1).padEnd(exponent + 1, "0");
    const rest = shown.slice(exponent + 1);
    return sign + whole + (rest ? "." + rest : "");
  }

  /** Python's str.format, for fields such as {scale:.9g}. */
  function fill(template, numbers) {
    return template.replace(/\{(\w+):(?:\.(\d+))?g\}/g, (_, name, digits) => general(numbers[name], Number(digits ?? 6)));
  }

  return { run, origins, round, toBits, fromBits, storedScale, scaleOf, group, decode, general, fill };
};
