// One connection: handshake, heartbeats, endings. docs/protocol.md, "The handshake" to "Endings".

import { createHash, createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import { Breach } from "./breach.js";
import { cut, decodeMessage, encodeMessage, FrameReader } from "./wire.js";

const VERSION = 1;
const LINGER_MS = 2000;
const NOTHING = Buffer.alloc(0);

/** The right mac of a side, "host" or "gateway"; none without a secret. */
export function macOf(side, secret, transcript) {
  if (secret === null) return NOTHING;
  return createHmac("sha256", secret).update(`rollflow ${side}`).update(transcript).digest();
}

/**
 * A connection over a stream, from `hello` on. `ended` is a promise of how it ended:
 *
 *     how        "goodbye", "refused" or "lost"
 *     code       of `refused`, by whichever side
 *     text       for people
 *     welcomed   whether the gateway had said `welcome` and proved the secret
 */
export class Connection {
  #stream;
  #session;
  #host;
  #reader = new FrameReader();
  #state = "hello";
  #hello;
  #transcript;
  #challenge;
  #isOver = false;
  #isWelcomed = false;
  #deadline;
  #beat;
  #silences = 0;
  #pings = 0;
  #finish;

  /**
   * `host`: `description` (the fields of `hello` that don't change), `secret` (bytes or null), `maxFrame`,
   * `handshakeS`, and `tell(line)` for the user.
   */
  constructor(stream, session, host) {
    this.#stream = stream;
    this.#session = session;
    this.#host = host;
    this.ended = new Promise((resolve) => (this.#finish = resolve));
    stream.on("data", (piece) => this.#receive(piece));
    stream.on("end", () => this.#close({ how: "lost", text: "the gateway closed the connection" }));
    stream.on("error", (error) => this.#close({ how: "lost", text: error.message }));
    stream.on("close", () => this.#close({ how: "lost", text: "the connection is closed" }));
    const late = () => this.#refuse(new Breach("handshake", `the handshake is not over after ${host.handshakeS} s`));
    this.#deadline = setTimeout(late, host.handshakeS * 1000);
    this.#sayHello();
  }

  /** Send a frame; nothing happens once the connection is over. */
  send(frame) {
    if (!this.#isOver) this.#stream.write(frame);
  }

  /** The host stops. */
  goodbye(reason) {
    this.send(encodeMessage({ kind: "goodbye", reason }));
    this.#close({ how: "goodbye", text: reason });
  }

  /** A newer connection counts. */
  replace() {
    this.#close({ how: "lost", text: "a newer connection has taken its place" });
  }

  #sayHello() {
    const { description, maxFrame } = this.#host;
    this.#hello = encodeMessage({
      kind: "hello",
      versions: [VERSION, VERSION],
      role: "env",
      software: description.software,
      name: description.name,
      nonce: randomBytes(32),
      session: this.#session.id,
      max_frame: maxFrame,
      slots: this.#session.slots,
      observation_space: description.observationSpace,
      action_space: description.actionSpace,
      autoreset: description.autoreset,
      metadata: description.metadata,
    });
    this.send(this.#hello);
  }

  #receive(piece) {
    if (this.#isOver) return;
    this.#silences = 0;
    this.#beat?.refresh();
    try {
      for (const frame of this.#reader.feed(piece)) {
        this.#take(decodeMessage(frame), frame);
        if (this.#isOver) return;
      }
    } catch (error) {
      if (!(error instanceof Breach)) throw error;
      this.#refuse(error);
    }
  }

  #take(message, frame) {
    const { kind } = message;
    if (kind === "refused") this.#close({ how: "refused", code: message.code, text: message.text });
    else if (kind === "goodbye") this.#close({ how: "goodbye", text: message.reason });
    else if (kind === "challenge" && this.#state === "hello") this.#prove(message, frame);
    else if (kind === "welcome" && this.#state === "welcome") this.#begin(message);
    else if (this.#state !== "running" || kind === "challenge" || kind === "welcome") {
      throw new Breach("order", `${kind} may not come now`);
    } else if (kind === "ping") this.send(encodeMessage({ kind: "pong", number: message.number }));
    else if (kind === "pong") {
      const { number } = message;
      if (number > this.#pings) throw new Breach("order", `pong ${number}: the last ping was ${this.#pings}`);
    } else this.#session.request(this, message);
  }

  #prove(challenge, frame) {
    const { secret } = this.#host;
    if (challenge.version !== VERSION) throw new Breach("version", `version ${challenge.version}, expected ${VERSION}`);
    if (challenge.secret && secret === null) throw new Breach("secret", "the gateway has a secret, this host has none");
    if (!challenge.secret && secret !== null) throw new Breach("secret", "this host has a secret, the gateway none");
    this.#challenge = challenge;
    this.#transcript = createHash("sha256").update(this.#hello).update(frame).digest();
    this.send(encodeMessage({ kind: "proof", mac: macOf("host", secret, this.#transcript) }));
    this.#state = "welcome";
  }

  #begin(welcome) {
    const expected = macOf("gateway", this.#host.secret, this.#transcript);
    const isRight = welcome.mac.length === expected.length && timingSafeEqual(welcome.mac, expected);
    if (!isRight) throw new Breach("secret", "welcome.mac: the gateway has another secret");
    this.#session.welcome(this, welcome, this.#challenge.max_frame);
    clearTimeout(this.#deadline);
    this.#isWelcomed = true;
    this.#state = "running";
    this.#reader.limit = this.#host.maxFrame;
    this.#beat = setInterval(() => this.#silence(), this.#challenge.heartbeat_s * 1000);
    this.#host.tell(welcome.resumed ? "welcome back" : "welcome");
  }

  #silence() {
    this.#silences += 1;
    if (this.#silences < 3) this.send(encodeMessage({ kind: "ping", number: ++this.#pings }));
    else this.#refuse(new Breach("silent", `nothing came for ${3 * this.#challenge.heartbeat_s} s`));
  }

  #refuse({ code, message }) {
    this.send(encodeMessage({ kind: "refused", code, text: cut(message, 4096) }));
    this.#close({ how: "refused", code, text: message });
  }

  #close(ending) {
    if (this.#isOver) return;
    this.#isOver = true;
    clearTimeout(this.#deadline);
    clearInterval(this.#beat);
    this.#session.left(this);
    // Where bytes are left unread the system resets a connection that is closed, and what was said last may not
    // arrive: read on, but not for ever.
    this.#stream.end();
    this.#stream.resume();
    const linger = setTimeout(() => this.#stream.destroy(), LINGER_MS);
    this.#stream.once("close", () => clearTimeout(linger));
    this.#finish({ code: null, ...ending, welcomed: this.#isWelcomed });
  }
}
