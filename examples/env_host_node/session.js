// What a host remembers from one connection to the next: docs/protocol.md, "Numbers".

import { randomBytes } from "node:crypto";
import { Breach } from "./breach.js";
import { cut, encodeMessage } from "./wire.js";

/** Slots of each lane, as even as can be. */
export function shareOut(count, lanes) {
  return Array.from({ length: lanes }, (_, lane) => Math.floor((count + lanes - 1 - lane) / lanes));
}

/** One lane: the last request that it took, and once it is done, the frame that answers it. */
class Lane {
  number = 0;
  answer = null;
  mustReset = true;
  askedBy = null;

  constructor(group) {
    this.group = group;
  }

  get isIdle() {
    return this.number === 0 || this.answer !== null;
  }
}

/**
 * The lanes of a host; `lanes` is a list of `[slots, envs]`, where `envs` has
 *
 *     checkActions(actions)   what `step` takes; throws a Breach
 *     reset(seeds, options)   the fields of `rows` after a reset
 *     step(actions)           the fields of `rows`
 *
 * `reset` and `step` may give promises. What they throw becomes `failed`.
 */
export class Session {
  #groups;
  #lanes = null;
  #maxFrame = Infinity;
  connection = null;

  constructor(lanes) {
    // `work` is what environments are at, which may be for a lane that is forgotten.
    this.#groups = lanes.map(([slots, envs]) => ({ slots, envs, work: Promise.resolve() }));
    this.forget();
  }

  get slots() {
    return this.#groups.map(({ slots }) => slots);
  }

  /** Begin anew, under another id. */
  forget() {
    this.id = randomBytes(16);
    this.#lanes = null;
  }

  /**
   * A gateway that takes frames of `maxFrame` bytes has said `welcome`, and proved the secret: from here on
   * `connection` is the one that counts.
   */
  welcome(connection, { session, resumed, lanes }, maxFrame = Infinity) {
    if (!this.id.equals(session)) throw new Breach("session", "welcome.session is not the host's");
    const fits = `${lanes.map((lane) => lane.slots)}` === `${this.slots}`;
    const areDifferent = new Set(lanes.map(({ lane }) => lane)).size === lanes.length;
    if (!fits || !areDifferent) throw new Breach("session", "welcome.lanes are not those of the hello");
    const known = resumed && this.#lanes !== null ? this.#lanes : this.#anew(lanes);
    for (const { lane: id, number } of lanes) {
      const lane = known.get(id);
      if (lane === undefined) throw new Breach("session", `welcome.lanes: lane ${id} is not one of the session's`);
      const isRight = number === lane.number ? lane.isIdle : number === lane.number - 1;
      if (!isRight) throw new Breach("session", `welcome.lanes: lane ${id} is at ${number}, here at ${lane.number}`);
    }
    this.#lanes = known;
    this.#maxFrame = maxFrame;
    this.connection?.replace();
    this.connection = connection;
  }

  /** A connection is over; its answers are kept. */
  left(connection) {
    if (this.connection === connection) this.connection = null;
  }

  /** Take a request, answer it again, or pass it over, by its number. */
  request(connection, message) {
    const { kind, lane: id, number } = message;
    const lane = this.#lanes.get(id);
    if (lane === undefined) throw new Breach("number", `${kind} ${number} of lane ${id}: no lane of this host's`);
    if (number < lane.number) return;
    if (number === lane.number) {
      lane.askedBy = connection;
      if (lane.answer !== null) connection.send(lane.answer);
    } else if (number === lane.number + 1 && lane.isIdle) {
      this.#take(lane, connection, message);
    } else {
      throw new Breach("number", `${kind} ${number} of lane ${id}: the last was ${lane.number}`);
    }
  }

  #anew(lanes) {
    return new Map(lanes.map(({ lane: id }, index) => [id, new Lane(this.#groups[index])]));
  }

  #take(lane, connection, message) {
    const { kind, lane: id, number, seeds, options } = message;
    const { slots, envs } = lane.group;
    let job;
    if (kind === "reset") {
      const count = seeds?.length ?? slots;
      if (count !== slots) throw new Breach("request", `${count} seeds for the ${slots} slots of lane ${id}`);
      job = () => envs.reset(seeds, options);
    } else {
      if (lane.mustReset) throw new Breach("order", `step ${number} of lane ${id}: expected a reset`);
      const actions = envs.checkActions(message.actions);
      job = () => envs.step(actions);
    }
    lane.number = number;
    lane.answer = null;
    lane.askedBy = connection;
    lane.group.work = lane.group.work.then(() => this.#work(lane, { lane: id, number }, job));
  }

  async #work(lane, request, job) {
    try {
      const answer = encodeMessage({ kind: "rows", ...request, ...(await job()) });
      const nbytes = answer.length - 4;
      if (nbytes > this.#maxFrame) throw new RangeError(`rows of ${nbytes} bytes, the gateway takes ${this.#maxFrame}`);
      lane.answer = answer;
      lane.mustReset = false;
    } catch (error) {
      lane.answer = encodeMessage(failed(request, error));
      lane.mustReset = true;
    }
    // Another connection asks again.
    if (lane.askedBy === this.connection) this.connection?.send(lane.answer);
  }
}

function failed(request, error) {
  const isError = error instanceof Error;
  return {
    kind: "failed",
    ...request,
    type: cut(isError ? error.name : typeof error, 256),
    text: cut(isError ? error.message : String(error), 65_536),
    notes: (error?.notes ?? []).slice(0, 64).map((note) => cut(note, 4096)),
    traceback: cut((isError && error.stack) || "", 65_536),
  };
}
