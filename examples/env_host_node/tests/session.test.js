import assert from "node:assert/strict";
import { test } from "node:test";
import { decode } from "@msgpack/msgpack";
import { Session } from "../session.js";

/** Environments that answer when they are told to, and count how often they were asked. */
class Slow {
  asked = [];
  #waiting = [];

  checkActions(actions) {
    return actions;
  }

  reset(seeds, options) {
    return this.#ask(["reset", seeds, options]);
  }

  step(actions) {
    return this.#ask(["step", actions]);
  }

  async answer(fields = {}) {
    this.#waiting.shift().resolve(fields);
    await settled();
  }

  async fail(error) {
    this.#waiting.shift().reject(error);
    await settled();
  }

  #ask(what) {
    this.asked.push(what);
    return new Promise((resolve, reject) => this.#waiting.push({ resolve, reject }));
  }
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

class Wire {
  sent = [];
  isReplaced = false;

  send(frame) {
    this.sent.push(frame);
  }

  replace() {
    this.isReplaced = true;
  }

  get last() {
    const frame = this.sent.at(-1);
    return decode(frame.subarray(8, 8 + frame.readUInt32LE(4)));
  }
}

function begin(numbers = [0], { resumed = false, session = undefined } = {}) {
  const envs = numbers.map(() => new Slow());
  session ??= new Session(envs.map((each) => [2, each]));
  const wire = new Wire();
  welcome(session, wire, numbers, resumed);
  return { session, wire, envs, env: envs[0] };
}

function welcome(session, wire, numbers, resumed = true) {
  const lanes = numbers.map((number, index) => ({ lane: 5 + index, slots: 2, first_slot: 2 * index, number }));
  session.welcome(wire, { session: session.id, resumed, lanes });
}

const reset = (number, lane = 5) => ({ kind: "reset", lane, number, seeds: null, options: null });
const step = (number, lane = 5) => ({ kind: "step", lane, number, actions: [0, 1] });

async function stepped(begun) {
  const { session, wire, env } = begun;
  session.request(wire, reset(1));
  await settled();
  await env.answer();
  session.request(wire, step(2));
  await settled();
  await env.answer({ of: 2 });
  return begun;
}

test("a request is answered once, with its lane and number", async () => {
  const { wire, env } = await stepped(begin());
  assert.deepEqual(env.asked, [["reset", null, null], ["step", [0, 1]]]);
  assert.equal(wire.sent.length, 2);
  assert.deepEqual(wire.last, { kind: "rows", lane: 5, number: 2, of: 2 });
});

test("the last request is answered again by the same bytes, and not stepped again", async () => {
  const { session, wire, env } = await stepped(begin());
  session.request(wire, step(2));
  await settled();
  assert.equal(wire.sent.length, 3);
  assert.equal(wire.sent[2], wire.sent[1]);
  assert.equal(env.asked.length, 2);
});

test("a request that is under way, or older, is passed over", async () => {
  const { session, wire, env } = await stepped(begin());
  session.request(wire, step(3));
  session.request(wire, step(3));
  session.request(wire, step(1));
  await settled();
  assert.deepEqual([env.asked.length, wire.sent.length], [3, 2]);
  await env.answer({ of: 3 });
  assert.deepEqual([wire.sent.length, wire.last.of], [3, 3]);
});

test("a number too high is refused, and so is the next one while the last is under way", async () => {
  const { session, wire } = await stepped(begin());
  assert.throws(() => session.request(wire, step(4)), { code: "number" });
  session.request(wire, step(3));
  assert.throws(() => session.request(wire, step(4)), { code: "number" });
  assert.throws(() => session.request(wire, step(1, 9)), { code: "number" });
});

test("lanes don't wait for each other", async () => {
  const { session, wire, envs } = begin([0, 0]);
  session.request(wire, reset(1, 5));
  session.request(wire, reset(1, 6));
  await settled();
  await envs[1].answer();
  assert.deepEqual([wire.last.lane, wire.sent.length], [6, 1]);
  await envs[0].answer();
  assert.deepEqual([wire.last.lane, wire.sent.length], [5, 2]);
});

test("what was under way when the connection broke goes on, and is answered where it is asked again", async () => {
  const { session, wire, env } = await stepped(begin());
  session.request(wire, step(3));
  await settled();
  session.left(wire);
  const second = new Wire();
  welcome(session, second, [2]);
  await env.answer({ of: 3 });
  assert.deepEqual([wire.sent.length, second.sent.length], [2, 0]);
  session.request(second, step(3));
  assert.deepEqual([second.sent.length, second.last.of, env.asked.length], [1, 3, 3]);
});

test("an answer that comes after it was asked for again is sent once", async () => {
  const { session, wire, env } = await stepped(begin());
  session.request(wire, step(3));
  await settled();
  session.left(wire);
  const second = new Wire();
  welcome(session, second, [2]);
  session.request(second, step(3));
  await env.answer({ of: 3 });
  assert.deepEqual([wire.sent.length, second.sent.length], [2, 1]);
});

test("an answer that was lost with its connection is sent on the next", async () => {
  const { session } = await stepped(begin());
  const second = new Wire();
  welcome(session, second, [1]);
  session.request(second, step(2));
  assert.equal(second.last.of, 2);
});

test("the newest connection counts", async () => {
  const { session, wire } = await stepped(begin());
  const second = new Wire();
  welcome(session, second, [2]);
  assert.ok(wire.isReplaced);
  session.left(wire);
  assert.equal(session.connection, second);
});

test("a gateway that has other numbers can't go on", async () => {
  for (const number of [0, 3]) {
    const { session } = await stepped(begin());
    assert.throws(() => welcome(session, new Wire(), [number]), { code: "session" });
  }
  const { session, wire } = await stepped(begin());
  session.request(wire, step(3));
  assert.throws(() => welcome(session, new Wire(), [3]), { code: "session" }); // which is not answered yet
  assert.throws(() => begin([4], { resumed: true }), { code: "session" });
});

test("a first welcome may have been lost", () => {
  const { session, wire } = begin([0], { resumed: true });
  session.request(wire, reset(1));
});

test("a gateway that does not know the session begins anew, once the environments are free", async () => {
  const { session, wire, env } = await stepped(begin());
  session.request(wire, step(3));
  await settled();
  const second = new Wire();
  welcome(session, second, [0], false);
  session.request(second, reset(1));
  await settled();
  assert.equal(env.asked.length, 3);
  await env.answer({ of: 3 });
  await settled();
  assert.deepEqual([env.asked.length, second.sent.length], [4, 0]);
  await env.answer();
  assert.deepEqual([second.last.number, wire.sent.length], [1, 2]);
});

test("a lane begins with a reset, also after a failure", async () => {
  const { session, wire, env } = begin();
  assert.throws(() => session.request(wire, step(1)), { code: "order" });
  session.request(wire, reset(1));
  await settled();
  await env.fail(Object.assign(new TypeError("the arm is stuck"), { notes: ["slot 1"] }));
  const { traceback, ...failed } = wire.last;
  assert.match(traceback, /^TypeError: the arm is stuck\n +at /);
  const what = { type: "TypeError", text: "the arm is stuck", notes: ["slot 1"] };
  assert.deepEqual(failed, { kind: "failed", lane: 5, number: 1, ...what });
  assert.throws(() => session.request(wire, step(2)), { code: "order" });
  session.request(wire, reset(1));
  assert.equal(wire.sent[1], wire.sent[0]);
  session.request(wire, reset(2));
  await settled();
  await env.answer();
  assert.equal(wire.last.kind, "rows");
});

test("what is thrown may be anything, and long", async () => {
  const { session, wire, env } = begin();
  session.request(wire, reset(1));
  await settled();
  await env.fail("x".repeat(70_000));
  assert.deepEqual([wire.last.type, wire.last.text.length, wire.last.notes], ["string", 65_536, []]);
});

test("there is a seed for each slot, or none", () => {
  const { session, wire } = begin();
  assert.throws(() => session.request(wire, { ...reset(1), seeds: [1n] }), { code: "request" });
  session.request(wire, { ...reset(1), seeds: [1n, 2n] });
});

test("lanes that are not the host's are refused", () => {
  const { session } = begin();
  assert.throws(() => welcome(session, new Wire(), [0, 0]), { code: "session" });
  const lanes = [{ lane: 5, slots: 3, first_slot: 0, number: 0 }];
  for (const id of [session.id, Buffer.alloc(16)]) {
    assert.throws(() => session.welcome(new Wire(), { session: id, resumed: false, lanes }), { code: "session" });
  }
  const twins = new Session([[2, new Slow()], [2, new Slow()]]);
  lanes[0].slots = 2;
  const said = { session: twins.id, resumed: false, lanes: [lanes[0], lanes[0]] };
  assert.throws(() => twins.welcome(new Wire(), said), { code: "session" });
});
