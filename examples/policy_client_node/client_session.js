// What a client remembers from one connection to the next: docs/protocol.md, "Clients that want actions".

import { randomBytes } from "node:crypto";
import { Breach } from "../env_host_node/breach.js";
import { encodeMessage } from "../env_host_node/wire.js";

/** The server has not given an action; `status` says why, as HTTP does: 410 where the session has no memory there. */
export class RefusedError extends Error {
  constructor(status, text) {
    super(text);
    this.name = "RefusedError";
    this.status = status;
  }
}

/** Requests, each with a number, until they are answered; `policies` is what the server said it serves. */
export class ClientSession {
  slots = [1];
  policies = null;
  #number = 0;
  #window = 0;
  #connection = null;
  #underWay = new Map();
  #waiting = [];
  #whenKnown = [];

  constructor() {
    this.forget();
  }

  /** Go on under another id: the server does not take this one. */
  forget() {
    this.id = randomBytes(16);
  }

  /** A promise of the policies that are served, by name. */
  known() {
    if (this.policies !== null) return Promise.resolve(this.policies);
    return new Promise((resolve, reject) => this.#whenKnown.push({ resolve, reject }));
  }

  /** A promise of the `acted` that answers a request with these fields. */
  ask(fields) {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ fields, resolve, reject });
      this.#sendWaiting();
    });
  }

  /** Send a message that needs no answer, where there is a connection. */
  say(message) {
    this.#connection?.send(encodeMessage(message));
  }

  /** Nothing will be answered any more. */
  end(error) {
    for (const { reject } of [...this.#underWay.values(), ...this.#waiting, ...this.#whenKnown]) reject(error);
    this.#underWay.clear();
    this.#waiting = [];
    this.#whenKnown = [];
  }

  /** A server has said `welcome`, and proved the secret: it is asked again what has no answer. */
  welcome(connection, { session, credits }) {
    if (!this.id.equals(session)) throw new Breach("session", "welcome.session is not the client's");
    if (credits < 1) throw new Breach("session", "welcome.credits is 0, expected the requests that may be under way");
    this.#connection?.replace();
    this.#connection = connection;
    this.#window = credits;
    for (const { frame } of this.#underWay.values()) connection.send(frame);
    this.#sendWaiting();
  }

  /** A connection is over; what it has not answered is asked again by the next one. */
  left(connection) {
    if (this.#connection === connection) this.#connection = null;
  }

  /** Take `settings` or `acted`. */
  request(connection, { kind, ...fields }) {
    if (kind === "settings") {
      this.policies = fields.settings.policies;
      for (const { resolve } of this.#whenKnown.splice(0)) resolve(this.policies);
      return;
    }
    const { number } = fields;
    if (number > this.#number) throw new Breach("number", `acted ${number}, the last request was ${this.#number}`);
    const asked = this.#underWay.get(number);
    if (asked === undefined) return;
    this.#underWay.delete(number);
    asked.resolve(fields);
    this.#sendWaiting();
  }

  get #done() {
    const [oldest] = this.#underWay.keys();
    return oldest === undefined ? this.#number : oldest - 1;
  }

  #sendWaiting() {
    while (this.#waiting.length > 0 && this.#number < this.#done + this.#window) {
      const { fields, ...asked } = this.#waiting.shift();
      const done = this.#done;
      const number = ++this.#number;
      const frame = encodeMessage({ kind: "act", number, done, ...fields });
      this.#underWay.set(number, { frame, ...asked });
      this.#connection?.send(frame);
    }
  }
}
