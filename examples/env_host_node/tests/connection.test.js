import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { once } from "node:events";
import net from "node:net";
import { test } from "node:test";
import { decode } from "@msgpack/msgpack";
import { ACTION_SPACE, CartPoleLane, OBSERVATION_SPACE } from "../cartpole.js";
import { Connection, macOf } from "../connection.js";
import { dial, readAddress } from "../serve.js";
import { Session, shareOut } from "../session.js";
import { encodeMessage, FrameReader, NdArray } from "../wire.js";

const HOST = {
  description: {
    software: "test",
    name: "test",
    observationSpace: OBSERVATION_SPACE,
    actionSpace: ACTION_SPACE,
    autoreset: "SAME_STEP",
    metadata: {},
  },
  secret: null,
  maxFrame: 1 << 16,
  handshakeS: 5,
  tell: () => {},
};

/** A gateway by hand, on one connection. */
class Gateway {
  #reader = new FrameReader(1 << 20);
  #pieces;
  #transcript = createHash("sha256");

  constructor(stream, secret) {
    this.stream = stream;
    this.secret = secret;
    this.#pieces = this.#read(stream);
  }

  async *#read(stream) {
    for await (const piece of stream) yield* this.#reader.feed(piece);
  }

  say(kind, fields) {
    const frame = encodeMessage({ kind, ...fields });
    if (kind === "challenge") this.#transcript.update(frame);
    this.stream.write(frame);
  }

  /** The next message of the host's; undefined where it has ended. */
  async hear() {
    const { value: frame, done } = await this.#pieces.next();
    if (done) return undefined;
    const message = decode(frame.subarray(8, 8 + Buffer.from(frame.buffer).readUInt32LE(4)));
    if (message.kind === "hello") {
      this.#transcript.update(frame);
      this.hello = message;
    }
    return message;
  }

  async challenge(fields = {}) {
    assert.equal((await this.hear()).kind, "hello");
    this.say("challenge", {
      version: 1,
      software: "test",
      nonce: randomBytes(32),
      secret: this.secret !== null,
      max_frame: 1 << 16,
      heartbeat_s: 10,
      grace_s: 60,
      ...fields,
    });
  }

  async welcome({ challenge = {}, ...fields } = {}) {
    await this.challenge(challenge);
    const { mac } = await this.hear();
    const transcript = this.#transcript.digest();
    assert.deepEqual(Buffer.from(mac), macOf("host", this.secret, transcript));
    const lanes = this.hello.slots.map((slots, lane) => ({ lane, slots, first_slot: 0, number: 0 }));
    this.say("welcome", {
      mac: macOf("gateway", this.secret, transcript),
      session: this.hello.session,
      resumed: false,
      credits: 0,
      lanes,
      ...fields,
    });
  }
}

/** `use(gateway, ended)` with a host and a gateway that are connected. */
async function connected({ secret = null, host = {}, slots = 2 }, use) {
  const server = net.createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const stream = net.connect(server.address().port, "127.0.0.1");
  const [there] = await once(server, "connection");
  const session = new Session([[slots, new CartPoleLane(slots)]]);
  const connection = new Connection(stream, session, { ...HOST, secret, ...host });
  try {
    return await use(new Gateway(there, secret), connection.ended, connection);
  } finally {
    there.destroy();
    stream.destroy();
    server.close();
  }
}

async function refusal(gateway, ended) {
  let message;
  do message = await gateway.hear();
  while (message.kind !== "refused");
  assert.equal(await gateway.hear(), undefined);
  const ending = await ended;
  assert.deepEqual([ending.how, ending.text], ["refused", message.text]);
  assert.equal(ending.code, message.code);
  return message.code;
}

const RESET = { lane: 0, number: 1, seeds: [1, 2], options: null };

for (const secret of [null, "a secret"]) {
  test(`a lane is reset and stepped, ${secret === null ? "without" : "with"} a secret`, () =>
    connected({ secret }, async (gateway, ended) => {
      await gateway.welcome();
      gateway.say("reset", RESET);
      assert.deepEqual([(await gateway.hear()).kind, gateway.hello.slots], ["rows", [2]]);
      gateway.say("ping", { number: 1 });
      assert.deepEqual(await gateway.hear(), { kind: "pong", number: 1 });
      gateway.say("step", { lane: 0, number: 2, actions: new NdArray("<i8", [2], BigInt64Array.of(0n, 1n)) });
      assert.equal((await gateway.hear()).number, 2);
      gateway.say("goodbye", { reason: "enough" });
      assert.equal(await gateway.hear(), undefined);
      assert.deepEqual(await ended, { how: "goodbye", code: null, text: "enough", welcomed: true });
    }));
}

for (const [what, secret, mac] of [
  ["another one", "a secret", randomBytes(32)],
  ["none", "a secret", Buffer.alloc(0)],
  ["one too many", null, randomBytes(32)],
]) {
  test(`a gateway that proves no secret is refused: ${what}`, () =>
    connected({ secret }, async (gateway, ended) => {
      await gateway.welcome({ mac });
      gateway.say("reset", RESET);
      assert.equal(await refusal(gateway, ended), "secret");
      assert.equal((await ended).welcomed, false);
    }));
}

for (const [what, fields, code] of [
  ["another version", { version: 2 }, "version"],
  ["a secret where there is none", { secret: true }, "secret"],
  ["too small a frame", { max_frame: 1000 }, "message"],
]) {
  test(`a challenge with ${what} is refused`, () =>
    connected({}, async (gateway, ended) => {
      await gateway.challenge(fields);
      assert.equal(await refusal(gateway, ended), code);
    }));
}

for (const kind of ["ping", "reset"]) {
  test(`${kind} before welcome is refused`, () =>
    connected({}, async (gateway, ended) => {
      await gateway.challenge();
      gateway.say(kind, kind === "reset" ? RESET : { number: 1 });
      assert.equal(await refusal(gateway, ended), "order");
    }));
}

test("a pong above the last ping is refused", () =>
  connected({}, async (gateway, ended) => {
    await gateway.welcome();
    gateway.say("pong", { number: 1 });
    assert.equal(await refusal(gateway, ended), "order");
  }));

test("a frame above the host's limit is refused, after welcome only", () =>
  connected({}, async (gateway, ended) => {
    await gateway.welcome({ filler: "x".repeat(1 << 17) });
    gateway.say("reset", { ...RESET, options: { filler: "x".repeat(1 << 16) } });
    assert.equal(await refusal(gateway, ended), "frame");
  }));

test("an answer above the gateway's limit is a failure", () =>
  connected({ slots: 3000 }, async (gateway) => {
    await gateway.welcome();
    gateway.say("reset", { ...RESET, seeds: null });
    assert.equal((await gateway.hear()).kind, "rows");
    gateway.say("step", { lane: 0, number: 2, actions: new NdArray("<i8", [3000], new BigInt64Array(3000)) });
    const { kind, text } = await gateway.hear();
    assert.equal(kind, "failed");
    assert.match(text, /^rows of \d+ bytes, the gateway takes 65536$/);
  }));

test("a handshake that takes too long is refused", () =>
  connected({ host: { handshakeS: 0.05 } }, async (gateway, ended) => {
    assert.equal(await refusal(gateway, ended), "handshake");
  }));

test("a silent gateway is pinged twice, and refused", () =>
  connected({}, async (gateway, ended) => {
    await gateway.welcome({ challenge: { heartbeat_s: 0.05 } });
    assert.deepEqual(await gateway.hear(), { kind: "ping", number: 1 });
    gateway.say("pong", { number: 1 });
    assert.deepEqual(await gateway.hear(), { kind: "ping", number: 2 });
    assert.deepEqual(await gateway.hear(), { kind: "ping", number: 3 });
    assert.equal(await refusal(gateway, ended), "silent");
  }));

test("a connection that ends in the middle of a frame is lost", () =>
  connected({}, async (gateway, ended) => {
    await gateway.welcome();
    gateway.stream.end(encodeMessage({ kind: "ping", number: 1 }).subarray(0, 9));
    assert.equal((await ended).how, "lost");
  }));

test("a host that stops says goodbye", () =>
  connected({}, async (gateway, ended, connection) => {
    await gateway.welcome();
    connection.goodbye("stopped");
    assert.deepEqual(await gateway.hear(), { kind: "goodbye", reason: "stopped" });
    assert.equal(await gateway.hear(), undefined);
  }));

test("a host dials again with its session, and with another where that can't go on", async () => {
  const server = net.createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const session = new Session([[1, new CartPoleLane(1)]]);
  const options = { retryS: 5, signal: new AbortController().signal };
  const dialling = dial({ host: "127.0.0.1", port: server.address().port }, session, HOST, options);
  const sessions = [];
  for (const code of [null, "busy", "session", "role"]) {
    const [stream] = await once(server, "connection");
    const gateway = new Gateway(stream, null);
    await gateway.hear();
    sessions.push(Buffer.from(gateway.hello.session).toString("hex"));
    if (code === null) stream.destroy();
    else gateway.say("refused", { code, text: "no" });
  }
  assert.deepEqual(await dialling, { how: "refused", code: "role", text: "no", welcomed: false });
  server.close();
  assert.deepEqual([sessions[1], sessions[2]], [sessions[0], sessions[0]]);
  assert.notEqual(sessions[3], sessions[0]);
});

test("addresses and lanes are read", () => {
  assert.deepEqual(readAddress("tcp://127.0.0.1:7010"), { host: "127.0.0.1", port: 7010 });
  assert.deepEqual(readAddress("tcp://[::1]:7010"), { host: "::1", port: 7010 });
  assert.deepEqual(readAddress("unix:/tmp/socket"), { path: "/tmp/socket" });
  for (const wrong of ["tcp://127.0.0.1", "tcp://127.0.0.1:70000", "http://127.0.0.1:80", "unix:", "tcp://::1:80"]) {
    assert.throws(() => readAddress(wrong), /is no address/);
  }
  assert.deepEqual([shareOut(4, 2), shareOut(5, 2), shareOut(3, 3)], [[2, 2], [3, 2], [1, 1, 1]]);
});
