// A client of `rollflow serve --listen`: it has policies choose actions.

import { dial, readAddress, told } from "../env_host_node/serve.js";
import { FOR_A_CLIENT, NdArray } from "../env_host_node/wire.js";
import { ClientSession, RefusedError } from "./client_session.js";
import { itemOf, rowOf } from "./items.js";

/**
 * `address`: tcp://host:port or unix:/path. Options:
 *
 *     secret    text or bytes, the server's; null: it has none
 *     policy    the name of the policy that acts; undefined: the only one
 *     name      what the server calls this client
 *     retryS    seconds that the server may be away
 *     tell      takes lines for the user
 *
 * A session's first observation begins an episode, and so does the first one after `reset`. Connections that break are
 * dialled again; each request is acted on once.
 */
export class PolicyClient {
  #session = new ClientSession();
  #begun = new Set();
  #stop = new AbortController();
  #policy;

  constructor(address, { secret = null, policy, name = "javascript", retryS = 60, tell = () => {} } = {}) {
    this.#policy = policy;
    const host = {
      role: "client",
      fields: FOR_A_CLIENT,
      description: {
        software: `rollflow-policy-client, node ${process.version}`,
        name,
        observationSpace: {},
        actionSpace: {},
        autoreset: "DISABLED",
        metadata: {},
      },
      secret: typeof secret === "string" ? Buffer.from(secret.trim()) : secret,
      maxFrame: 64 << 20,
      handshakeS: 10,
      tell,
    };
    this.ended = this.#serve(readAddress(address), host, retryS, tell);
  }

  /** A promise of the action for an observation; rejects with a RefusedError where there is none. */
  async act(observation, { session = "default", reward = null, policy = this.#policy } = {}) {
    const policies = await this.#session.known();
    const name = policy ?? (Object.keys(policies).length === 1 ? Object.keys(policies)[0] : undefined);
    if (!Object.hasOwn(policies, name)) throw new RefusedError(404, `no policy '${name}' is served`);
    const key = JSON.stringify([name, session]);
    const acted = await this.#session.ask({
      policy: name,
      version: null,
      sessions: [session],
      begins: new NdArray("|b1", [1], Uint8Array.of(this.#begun.has(key) ? 0 : 1)),
      rewards: reward === null ? null : new NdArray("<f4", [1], Float32Array.of(reward)),
      obs: rowOf(policies[name].observation_space, observation),
    });
    if (acted.places.length === 0) throw new RefusedError(Number(acted.refused[0][1]), acted.refused[0][2]);
    this.#begun.add(key);
    return itemOf(acted.actions);
  }

  /** Begin an episode with the session's next observation. */
  async reset(session = "default", policy = this.#policy) {
    const policies = await this.#session.known();
    this.#begun.delete(JSON.stringify([policy ?? Object.keys(policies)[0], session]));
  }

  /** Say goodbye: the server forgets this client's sessions. */
  async close() {
    this.#stop.abort();
    await this.ended;
  }

  async #serve(address, host, retryS, tell) {
    for (;;) {
      const ending = await dial(address, this.#session, host, { retryS, signal: this.#stop.signal });
      // A server that says goodbye is closing: whoever listens next is asked what has no answer.
      if (ending.how === "goodbye" && !this.#stop.signal.aborted) continue;
      tell(told(ending));
      this.#session.end(new RefusedError(503, told(ending)));
      return;
    }
  }
}
