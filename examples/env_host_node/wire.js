// Frames, the values in them, and what the fields of messages have to be: docs/protocol.md, "Frames".

import { decode, encode, ExtData } from "@msgpack/msgpack";
import { Breach } from "./breach.js";
import { scan } from "./scan.js";

const MAX_HEADER = 4 << 20;
const MAX_DIMENSIONS = 32;
const ARRAY = 1;
export const MAX_FRAME_BEFORE_WELCOME = 1 << 20;

const DTYPES = {
  "|b1": [Uint8Array, 1],
  "|i1": [Int8Array, 1],
  "<i2": [Int16Array, 1],
  "<i4": [Int32Array, 1],
  "<i8": [BigInt64Array, 1],
  "|u1": [Uint8Array, 1],
  "<u2": [Uint16Array, 1],
  "<u4": [Uint32Array, 1],
  "<u8": [BigUint64Array, 1],
  "<f2": [Uint16Array, 1],
  "<f4": [Float32Array, 1],
  "<f8": [Float64Array, 1],
  "<c8": [Float32Array, 2],
  "<c16": [Float64Array, 2],
};

/** An array of a frame's body: `items` is a typed array of `shape`, in C order, and little-endian as the machine is. */
export class NdArray {
  constructor(dtype, shape, items) {
    this.dtype = dtype;
    this.shape = shape;
    this.items = items;
  }

  get bytes() {
    return new Uint8Array(this.items.buffer, this.items.byteOffset, this.items.byteLength);
  }
}

/** Infos as one map for each slot. */
export const infosBySlot = (maps) => new ExtData(5, encode(maps));

/** At most so many code points, and no halves of pairs, which UTF-8 doesn't have. */
export function cut(text, most) {
  const whole = text.toWellFormed();
  return whole.length <= most ? whole : [...whole].slice(0, most).join("");
}

const upTo8 = (size) => Math.ceil(size / 8) * 8;

const extensionCodec = {
  tryToEncode(value, body) {
    if (value instanceof ExtData) return value;
    if (!(value instanceof NdArray)) return null;
    const offset = body.size;
    body.arrays.push([offset, value.bytes]);
    body.size += upTo8(value.items.byteLength);
    return new ExtData(ARRAY, encode([value.dtype, value.shape, offset]));
  },
  decode(payload, code, body) {
    if (code === ARRAY) return readArray(decode(payload, { extensionCodec: NO_EXTS }), body);
    return new ExtData(code, payload); // nothing that a host of environments is sent has these
  },
};

const NO_EXTS = {
  decode() {
    throw new Breach("frame", "an ext value inside an array's description");
  },
};

function readArray(description, body) {
  const [dtype, shape, offset] = Array.isArray(description) && description.length === 3 ? description : [];
  if (!Object.hasOwn(DTYPES, dtype)) throw new Breach("frame", `array of dtype ${dtype} is unknown`);
  const isShape = Array.isArray(shape) && shape.length <= MAX_DIMENSIONS && shape.every((size) => isWhole(size, 0));
  if (!isShape) throw new Breach("frame", `array of shape ${shape}, expected up to ${MAX_DIMENSIONS} sizes`);
  const [Items, perItem] = DTYPES[dtype];
  const count = shape.reduce((product, size) => product * size, 1) * perItem;
  const nbytes = count * Items.BYTES_PER_ELEMENT;
  body.used += nbytes;
  const isInside = isWhole(offset, 0) && offset % 8 === 0 && offset + nbytes <= body.size && body.used <= body.size;
  if (!isInside) throw new Breach("frame", `array of ${nbytes} bytes at ${offset} of a body of ${body.size} bytes`);
  return new NdArray(dtype, shape, new Items(body.frame.buffer, body.start + offset, count));
}

/** The bytes of a message's frame. */
export function encodeMessage(message) {
  const body = { arrays: [], size: 0 };
  const header = encode(message, { extensionCodec, context: body });
  const start = upTo8(8 + header.length);
  const frame = Buffer.alloc(start + body.size);
  frame.writeUInt32LE(frame.length - 4, 0);
  frame.writeUInt32LE(header.length, 4);
  frame.set(header, 8);
  for (const [offset, bytes] of body.arrays) frame.set(bytes, start + offset);
  return frame;
}

/** Cuts what a connection brings into frames. */
export class FrameReader {
  #prefix = Buffer.alloc(8);
  #frame = null;
  #filled = 0;

  constructor(limit = MAX_FRAME_BEFORE_WELCOME) {
    this.limit = limit;
  }

  /** The frames that a piece completes; `limit` may be changed between two of them. */
  *feed(piece) {
    let at = 0;
    while (at < piece.length) {
      const into = this.#frame ?? this.#prefix;
      const count = Math.min(into.length - this.#filled, piece.length - at);
      into.set(piece.subarray(at, at + count), this.#filled);
      this.#filled += count;
      at += count;
      if (this.#frame === null) this.#begin();
      if (this.#frame !== null && this.#filled === this.#frame.length) {
        const frame = this.#frame;
        this.#frame = null;
        this.#filled = 0;
        yield frame;
      }
    }
  }

  #begin() {
    if (this.#filled < 4) return;
    const length = this.#prefix.readUInt32LE(0);
    if (length > this.limit) throw new Breach("frame", `frame of ${length} bytes, expected at most ${this.limit}`);
    if (length < 12 || length % 8 !== 4) throw new Breach("frame", `frame of ${length} bytes, expected 12, 20, 28…`);
    if (this.#filled < 8) return;
    const header = this.#prefix.readUInt32LE(4);
    const most = Math.min(length - 4, MAX_HEADER);
    if (header > most) throw new Breach("frame", `header of ${header} bytes, expected at most ${most}`);
    // A buffer of its own, so that the arrays in it are aligned.
    this.#frame = new Uint8Array(length + 4);
    this.#frame.set(this.#prefix);
  }
}

/** The message in a frame that was sent to a host of environments, checked. */
export function decodeMessage(frame) {
  const headerLength = new DataView(frame.buffer, frame.byteOffset).getUint32(4, true);
  const start = upTo8(8 + headerLength);
  const body = { frame, start: frame.byteOffset + start, size: frame.length - start, used: 0 };
  const bytes = frame.subarray(8, 8 + headerLength);
  scan(bytes);
  let header;
  try {
    header = decode(bytes, { useBigInt64: true, extensionCodec, context: body });
  } catch (error) {
    throw error instanceof Breach ? error : new Breach("frame", `header: ${error.message}`);
  }
  if (!isMap(header)) throw new Breach("frame", "header: expected a map");
  const { kind } = header;
  if (!Object.hasOwn(FOR_A_HOST, kind)) {
    if (FOR_OTHERS.includes(kind)) throw new Breach("order", `${kind}: nothing that may be sent here`);
    throw new Breach("message", `kind ${JSON.stringify(kind)} is unknown`);
  }
  return { kind, ...checkFields(kind, header, FOR_A_HOST[kind]) };
}

const isMap = (value) => value !== null && Object.getPrototypeOf(value) === Object.prototype;
const isWhole = (value, least = -Infinity) => Number.isSafeInteger(value) && value >= least;

// A check gives the value as the rest of the host wants it, and undefined for what is not allowed.
const whole = (least) => (value) => {
  const number = typeof value === "bigint" ? Number(value) : value;
  return isWhole(number, least) ? number : undefined;
};
const text = (most) => (value) => (typeof value === "string" && [...value].length <= most ? value : undefined);
const raw = (...sizes) => (value) =>
  value instanceof Uint8Array && sizes.includes(value.length) ? value : undefined;
const flag = (value) => (typeof value === "boolean" ? value : undefined);
const map = (value) => (isMap(value) ? value : undefined);
const seconds = (value) => {
  const number = typeof value === "bigint" ? Number(value) : value;
  return Number.isFinite(number) && number > 0 ? number : undefined;
};
const orNil = (check) => (value) => (value === null ? null : check(value));
const listOf = (check) => (value) => {
  const checked = Array.isArray(value) ? value.map(check) : undefined;
  return checked?.includes(undefined) ? undefined : checked;
};
const seed = (value) => (typeof value === "bigint" || isWhole(value, 0) ? BigInt(value) : undefined);
const tree = (value) => {
  if (value instanceof NdArray) return value;
  if (Array.isArray(value)) return listOf(tree)(value);
  return isMap(value) && !Object.values(value).map(tree).includes(undefined) ? value : undefined;
};

const LANE = { lane: whole(0), slots: whole(1), first_slot: whole(0), number: whole(0) };
const FOR_A_HOST = {
  challenge: {
    version: whole(1),
    software: text(256),
    nonce: raw(32),
    secret: flag,
    max_frame: whole(65_536),
    heartbeat_s: seconds,
    grace_s: seconds,
  },
  welcome: {
    mac: raw(0, 32),
    session: raw(16),
    resumed: flag,
    credits: whole(0),
    lanes: listOf((lane) => (isMap(lane) ? checkFields("welcome.lanes", lane, LANE) : undefined)),
  },
  ping: { number: whole(1) },
  pong: { number: whole(1) },
  goodbye: { reason: text(4096) },
  refused: { code: text(64), text: text(4096) },
  reset: { lane: whole(0), number: whole(1), seeds: orNil(listOf(seed)), options: orNil(map) },
  step: { lane: whole(0), number: whole(1), actions: tree },
};
const FOR_OTHERS = ["hello", "proof", "rows", "failed", "turn", "cut", "fragment", "settings", "weights", "states", "metrics"];

function checkFields(place, map, checks) {
  const checked = {};
  for (const [name, check] of Object.entries(checks)) {
    if (!Object.hasOwn(map, name)) throw new Breach("message", `${place}.${name}: the field is missing`);
    checked[name] = check(map[name]);
    if (checked[name] === undefined) throw new Breach("message", `${place}.${name} is not what it should be`);
  }
  return checked;
}
