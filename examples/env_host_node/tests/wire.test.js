import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { encode } from "@msgpack/msgpack";
import { ACTION_SPACE } from "../cartpole.js";
import { macOf } from "../connection.js";
import { scan } from "../scan.js";
import { cut, decodeMessage, encodeMessage, FrameReader, infosBySlot, NdArray } from "../wire.js";

const DOCUMENT = readFileSync(new URL("../../../docs/protocol.md", import.meta.url), "utf8");
const EXAMPLES = Object.fromEntries(
  [...DOCUMENT.matchAll(/^```hex ([a-z ]+)\n(.*?)^```/gms)].map(([, name, block]) => [
    name,
    Buffer.from(block.replace(/;.*$/gm, "").replace(/\s/g, ""), "hex"),
  ]),
);
const SECRET = "correct horse battery staple";
const counting = (from, count) => Uint8Array.from({ length: count }, (_, index) => from + index);
const SESSION = Buffer.from("f0e1d2c3b4a5968778695a4b3c2d1e0f", "hex");

const framesOf = (bytes, limit = 1 << 16) => [...new FrameReader(limit).feed(bytes)];
const messageOf = (name) => decodeMessage(framesOf(EXAMPLES[name])[0]);
const header = (value) => framesOf(encodeMessage(value))[0];
const floats = (dtype, shape, Items, ...items) => new NdArray(dtype, shape, Items.from(items));

const SENT = {
  hello: {
    versions: [1, 1],
    role: "env",
    software: "example 1.0",
    name: "sim-1",
    nonce: counting(0, 32),
    session: SESSION,
    max_frame: 1 << 26,
    slots: [2, 2],
    observation_space: {
      kind: "Box",
      low: ["<f4", [3], new Uint8Array(Float32Array.of(-1).buffer)],
      high: ["<f4", [3], new Uint8Array(Float32Array.of(1).buffer)],
    },
    action_space: ACTION_SPACE,
    autoreset: "SAME_STEP",
    metadata: { env: "Example-v0" },
  },
  rows: {
    lane: 0,
    number: 2,
    obs: floats("<f4", [2, 3], Float32Array, 0, 0.25, 0.5, 0, 0, 0),
    rewards: floats("<f8", [2], Float64Array, 1, -1),
    terminateds: floats("|b1", [2], Uint8Array, 0, 1),
    truncateds: floats("|b1", [2], Uint8Array, 0, 0),
    final_slots: [1],
    final_obs: floats("<f4", [1, 3], Float32Array, 1, 1, 1),
    infos: {},
    final_infos: infosBySlot([{}, { won: true }]),
  },
  "first rows": {
    lane: 0,
    number: 1,
    obs: floats("<f4", [2, 3], Float32Array, 0, 0.25, 0.5, 0, 0, 0),
    rewards: null,
    terminateds: null,
    truncateds: null,
    final_slots: [],
    final_obs: null,
    infos: {},
    final_infos: {},
  },
  failed: {
    lane: 0,
    number: 3,
    type: "ValueError",
    text: "the arm is stuck",
    notes: ["slot 1"],
    traceback: "Traceback …\nValueError: the arm is stuck",
  },
  ping: { number: 1 },
  pong: { number: 1 },
  goodbye: { reason: "the run is over" },
};

for (const [name, fields] of Object.entries(SENT)) {
  test(`${name} has the bytes of the document`, () => {
    const kind = name === "first rows" ? "rows" : name;
    assert.equal(encodeMessage({ kind, ...fields }).toString("hex"), EXAMPLES[name].toString("hex"));
  });
}

test("proof and welcome of the document have the macs of its hello and challenge", () => {
  const transcript = createHash("sha256").update(EXAMPLES.hello).update(EXAMPLES.challenge).digest();
  const proof = encodeMessage({ kind: "proof", mac: macOf("host", SECRET, transcript) });
  assert.equal(proof.toString("hex"), EXAMPLES.proof.toString("hex"));
  assert.deepEqual(Buffer.from(messageOf("welcome").mac), macOf("gateway", SECRET, transcript));
});

test("what a gateway sends is read as the document says", () => {
  assert.deepEqual(messageOf("challenge"), {
    kind: "challenge",
    version: 1,
    software: "rollflow 0.1",
    nonce: counting(32, 32),
    secret: true,
    max_frame: 1 << 26,
    heartbeat_s: 10,
    grace_s: 60,
  });
  const { mac, session, ...welcome } = messageOf("welcome");
  assert.equal(mac.length, 32);
  assert.deepEqual(Buffer.from(session), SESSION);
  assert.deepEqual(welcome, {
    kind: "welcome",
    resumed: false,
    credits: 0,
    lanes: [
      { lane: 0, slots: 2, first_slot: 0, number: 0 },
      { lane: 1, slots: 2, first_slot: 2, number: 0 },
    ],
  });
  assert.deepEqual(messageOf("reset"), { kind: "reset", lane: 0, number: 1, seeds: [11n, 12n], options: null });
  const step = messageOf("step");
  assert.deepEqual([step.lane, step.number, step.actions.dtype, step.actions.shape], [0, 2, "<i8", [2]]);
  assert.deepEqual(step.actions.items, BigInt64Array.of(1n, 0n));
  assert.deepEqual(messageOf("goodbye"), { kind: "goodbye", reason: "the run is over" });
  assert.equal(messageOf("refused").code, "secret");
});

test("frames may come in any pieces", () => {
  const bytes = Buffer.concat([EXAMPLES.step, EXAMPLES.ping, EXAMPLES.welcome]);
  for (const size of [1, 2, 3, 7, 8, 9, 71, 72, 73, bytes.length]) {
    const reader = new FrameReader();
    const frames = [];
    for (let at = 0; at < bytes.length; at += size) frames.push(...reader.feed(bytes.subarray(at, at + size)));
    assert.deepEqual(frames.map((frame) => decodeMessage(frame).kind), ["step", "ping", "welcome"]);
  }
});

const prefix = (length, headerLength) => Buffer.from(Uint32Array.of(length, headerLength).buffer);

for (const [what, length, headerLength] of [
  ["longer than the limit", 65_540, 10],
  ["shorter than any", 4, 0],
  ["not a multiple of 8", 16, 4],
  ["with a header longer than itself", 20, 17],
]) {
  test(`a frame ${what} is refused before the rest of it is there`, () => {
    assert.throws(() => framesOf(prefix(length, headerLength)), { code: "frame" });
  });
}

test("a header of more than 4 MiB is refused", () => {
  const length = (8 << 20) + 4;
  assert.throws(() => framesOf(prefix(length, (4 << 20) + 1), 1 << 30), { code: "frame" });
});

for (const kind of ["hello", "rows"]) {
  test(`${kind} is nothing for a host of environments`, () => {
    assert.throws(() => decodeMessage(framesOf(EXAMPLES[kind === "rows" ? "first rows" : kind])[0]), { code: "order" });
  });
}

for (const [what, message] of [
  ["of an unknown kind", { kind: "nonsense" }],
  ["without a kind", { number: 1 }],
  ["without a field", { kind: "ping" }],
  ["with a number that is none", { kind: "ping", number: "1" }],
  ["with a number that is too low", { kind: "ping", number: 0 }],
  ["with half a number", { kind: "ping", number: 1.5 }],
  ["with a text that is too long", { kind: "goodbye", reason: "x".repeat(4097) }],
  ["with actions that are no tree", { kind: "step", lane: 0, number: 1, actions: 3 }],
]) {
  test(`a message ${what} is refused`, () => assert.throws(() => decodeMessage(header(message)), { code: "message" }));
}

test("fields of other names are passed over, and lengths are in code points", () => {
  assert.deepEqual(decodeMessage(header({ kind: "ping", number: 7, colour: "red" })), { kind: "ping", number: 7 });
  assert.equal(decodeMessage(header({ kind: "goodbye", reason: "😀".repeat(4096) })).reason.length, 8192);
});

/** A step whose actions are an ext value of these bytes, with a body of 16. */
function stepWith(code, payload) {
  const rest = encode({ kind: "step", lane: 0, number: 1 });
  const ext = Buffer.concat([Buffer.from([0xc7, payload.length, code]), payload]);
  const whole = Buffer.concat([Buffer.from([0x84]), rest.subarray(1), encode("actions"), ext]);
  const start = Math.ceil((8 + whole.length) / 8) * 8;
  const frame = Buffer.alloc(start + 16);
  prefix(frame.length - 4, whole.length).copy(frame);
  whole.copy(frame, 8);
  return framesOf(frame)[0];
}

for (const [what, code, value] of [
  ["an array that begins outside its body", 1, ["<i8", [1], 16]],
  ["an array that ends outside its body", 1, ["<i8", [2], 8]],
  ["an array at a place that is no multiple of 8", 1, ["<i4", [1], 4]],
  ["an array of a negative size", 1, ["<i8", [-1], 0]],
  ["an array of an unknown dtype", 1, ["<f3", [1], 0]],
  ["an array without a place", 1, ["<i8", [1]]],
  ["an ext value of another code", 9, 1],
  ["a timestamp", 255, 1],
]) {
  test(`${what} is refused`, () => {
    assert.throws(() => decodeMessage(stepWith(code, Buffer.from(encode(value)))), { code: "frame" });
  });
}

test("an array of no items is one", () => {
  assert.deepEqual(decodeMessage(stepWith(1, Buffer.from(encode(["<i8", [0, 3], 0])))).actions.shape, [0, 3]);
});

test("lists inside each other, and values, have their limits", () => {
  let deep = 1;
  for (let depth = 0; depth < 32; depth += 1) deep = [deep];
  assert.throws(() => decodeMessage(header({ kind: "ping", number: 1, deep })), { code: "frame" });
  assert.equal(decodeMessage(header({ kind: "ping", number: 1, deep: deep[0] })).number, 1);
  const many = header({ kind: "ping", number: 1, many: new Array(3000).fill(0) });
  assert.equal(decodeMessage(many).number, 1);
  const [tooMany] = framesOf(encodeMessage({ kind: "ping", number: 1, many: new Array(262_144).fill(0) }), 1 << 20);
  assert.throws(() => decodeMessage(tooMany), { code: "frame" });
});

test("counts that no bytes are behind are refused before anything is made of them", () => {
  const claims = ["dd7fffffff", "df7fffffff", "c67fffffff", "c97fffffff01", "dc0003c0c0", "9a".repeat(40), "c1"];
  for (const claim of claims) {
    assert.throws(() => scan(Buffer.from(claim, "hex")), { code: "frame" });
  }
  const values = [null, true, -1, 300, 70_000, 5_000_000_000, -40_000, 1.5, "x".repeat(300), [1, [2, { a: "b" }]]];
  for (const value of values) {
    scan(encode(value));
  }
  scan(encode(new Uint8Array(70_000)));
  scan(encode(Array.from({ length: 70_000 }, (_, index) => index)));
});

test("numbers of 64 bits are read in full", () => {
  const message = { kind: "reset", lane: 0, number: 1, options: null, seeds: [2n ** 64n - 1n] };
  const bytes = Buffer.from(encode(message, { useBigInt64: true }));
  const start = Math.ceil((8 + bytes.length) / 8) * 8;
  const frame = Buffer.concat([prefix(start - 4, bytes.length), bytes, Buffer.alloc(start - 8 - bytes.length)]);
  assert.deepEqual(decodeMessage(framesOf(frame)[0]).seeds, [2n ** 64n - 1n]);
});

test("texts are cut to code points, and have no halves of pairs", () => {
  assert.equal(cut("a😀b", 2), "a😀");
  assert.equal(cut("\ud83d!", 5), "\ufffd!");
});
