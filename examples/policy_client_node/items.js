// Items of spaces, as plain numbers and lists, and rows of them: docs/protocol.md, "Spaces".

import { NdArray } from "../env_host_node/wire.js";

const ITEMS = {
  "|b1": Uint8Array,
  "|i1": Int8Array,
  "<i2": Int16Array,
  "<i4": Int32Array,
  "<i8": BigInt64Array,
  "|u1": Uint8Array,
  "<u2": Uint16Array,
  "<u4": Uint32Array,
  "<u8": BigUint64Array,
  "<f4": Float32Array,
  "<f8": Float64Array,
};

/** The dtype and the shape of one item of a space that is an array. */
function arrayOf(space) {
  if (space.kind === "Box") return [space.low[0], space.low[1]];
  if (space.kind === "Discrete") return [space.dtype, []];
  if (space.kind === "MultiDiscrete") return [space.nvec[0], space.nvec[1]];
  if (space.kind === "MultiBinary") return ["|i1", [space.shape].flat()];
  throw new Error(`a space of kind ${space.kind} is unknown`);
}

/** One item, numbers and nested lists, as a row of one; throws an Error that says where it does not fit. */
export function rowOf(space, item, where = "observation") {
  if (space.kind === "Dict") {
    return Object.fromEntries(space.parts.map(([key, part]) => [key, rowOf(part, item?.[key], `${where}.${key}`)]));
  }
  if (space.kind === "Tuple") return space.parts.map((part, index) => rowOf(part, item?.[index], `${where}[${index}]`));
  const [dtype, shape] = arrayOf(space);
  const Items = ITEMS[dtype];
  if (Items === undefined) throw new Error(`${where}: items of dtype ${dtype} can't be made here`);
  const numbers = [item].flat(Infinity).map(Number);
  const count = shape.reduce((product, size) => product * size, 1);
  if (numbers.length !== count || numbers.some(Number.isNaN)) {
    throw new Error(`${where} has ${numbers.length} items or no numbers, expected ${dtype}[${shape}]`);
  }
  const isBig = Items === BigInt64Array || Items === BigUint64Array;
  return new NdArray(dtype, [1, ...shape], Items.from(isBig ? numbers.map(BigInt) : numbers));
}

/** The first item of a row, as numbers and nested lists. */
export function itemOf(row) {
  if (Array.isArray(row)) return row.map(itemOf);
  if (!(row instanceof NdArray)) return Object.fromEntries(Object.entries(row).map(([key, part]) => [key, itemOf(part)]));
  return nested(Array.from(row.items, Number), row.shape.slice(1));
}

function nested(numbers, shape) {
  if (shape.length === 0) return numbers[0];
  const size = numbers.length / shape[0];
  return Array.from({ length: shape[0] }, (_, index) => nested(numbers.slice(index * size, (index + 1) * size), shape.slice(1)));
}
