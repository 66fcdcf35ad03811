// msgpack bytes, looked over before they are unpacked: the unpacker makes room for as many entries as a list claims,
// for each of many lists inside each other, so that a few bytes could ask for gigabytes. Of what has been looked over,
// every count is backed by bytes.

import { Breach } from "./breach.js";

const MAX_VALUES = 262_144;
const MAX_DEPTH = 32;
const EXT_CODES = [1, 2, 3, 4, 5];

const LIST = "list";
const MAP = "map";
const BYTES = "bytes";
const EXT = "ext";

// First byte -> what it begins, and bytes of the length that follows it; or the whole size of what has no length.
const LENGTHS = {
  0xc4: [BYTES, 1],
  0xc5: [BYTES, 2],
  0xc6: [BYTES, 4],
  0xc7: [EXT, 1],
  0xc8: [EXT, 2],
  0xc9: [EXT, 4],
  0xd9: [BYTES, 1],
  0xda: [BYTES, 2],
  0xdb: [BYTES, 4],
  0xdc: [LIST, 2],
  0xdd: [LIST, 4],
  0xde: [MAP, 2],
  0xdf: [MAP, 4],
};
const SIZES = { 0xc0: 1, 0xc2: 1, 0xc3: 1, 0xca: 5, 0xcb: 9 };
for (let power = 0; power < 4; power += 1) SIZES[0xcc + power] = SIZES[0xd0 + power] = 1 + 2 ** power;

/** Throw a Breach unless the bytes are one msgpack value within the limits, to the last byte. */
export function scan(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  let count = 0;

  function valuesFrom(at, many, depth) {
    count += many;
    if (count > MAX_VALUES) throw new Breach("frame", `header: more than ${MAX_VALUES} values`);
    if (depth > MAX_DEPTH) throw new Breach("frame", `header: more than ${MAX_DEPTH} lists and maps inside each other`);
    for (; many > 0; many -= 1) at = valueFrom(at, depth);
    return at;
  }

  function valueFrom(at, depth) {
    const first = view.getUint8(at);
    if (first < 0x80 || first >= 0xe0) return at + 1;
    if (first < 0x90) return valuesFrom(at + 1, 2 * (first & 0x0f), depth + 1);
    if (first < 0xa0) return valuesFrom(at + 1, first & 0x0f, depth + 1);
    if (first < 0xc0) return at + 1 + (first & 0x1f);
    if (first >= 0xd4 && first <= 0xd8) return extFrom(at + 1, 2 ** (first - 0xd4), depth);
    if (first in SIZES) return at + SIZES[first];
    if (!(first in LENGTHS)) throw new Breach("frame", `header: byte 0x${first.toString(16)} begins no value`);
    const [what, width] = LENGTHS[first];
    const length = width === 1 ? view.getUint8(at + 1) : width === 2 ? view.getUint16(at + 1) : view.getUint32(at + 1);
    at += 1 + width;
    if (what === BYTES) return at + length;
    if (what === EXT) return extFrom(at, length, depth);
    return valuesFrom(at, what === MAP ? 2 * length : length, depth + 1);
  }

  function extFrom(at, length, depth) {
    const code = view.getInt8(at);
    if (!EXT_CODES.includes(code)) throw new Breach("frame", `header: ext code ${code}, expected 1 to 5`);
    const end = at + 1 + length;
    const isOne = valuesFrom(at + 1, 1, depth + 1) === end;
    if (!isOne) throw new Breach("frame", `header: an ext value of ${length} bytes does not hold one value`);
    return end;
  }

  let end;
  try {
    end = valuesFrom(0, 1, 0);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    end = Infinity;
  }
  if (end !== bytes.length) throw new Breach("frame", `header: its ${bytes.length} bytes are not one msgpack value`);
}
