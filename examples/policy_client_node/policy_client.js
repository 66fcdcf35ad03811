// A client of `rollflow serve`: docs/how_to/serve_a_policy.md, "Messages over a WebSocket". It needs no package.

const PROTOCOL = 2;
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;

/** The server has not given an action; `status` says why, as HTTP does: 410 where the session has no memory there. */
export class RefusedError extends Error {
  constructor(status, text) {
    super(text);
    this.name = "RefusedError";
    this.status = status;
  }
}

/**
 * `address`: http://host:port or https://host:port. Options:
 *
 *     secret    text, the server's; null: it has none
 *     policy    the name of the policy that acts; undefined: the only one
 *     retryS    seconds that the server may be away
 *     tell      takes lines for the user
 *
 * A session's first observation begins an episode, and so does the first one after `reset`. Connections that break are
 * dialled again. A request of a session with a memory that was under way rejects with status 504, and the session begins
 * anew: nobody knows whether it was acted on.
 */
export class PolicyClient {
  #address;
  #headers;
  #policy;
  #retryMs;
  #tell;
  #name = crypto.randomUUID();
  #policies = null;
  #whenKnown = [];
  #sessions = new Map();
  #asked = new Map();
  #number = 0;
  #socket = null; // once it has answered `hello`
  #lostAt = Date.now();
  #failures = 0;
  #ending = null;

  constructor(address, { secret = null, policy, retryS = 60, tell = () => {} } = {}) {
    this.#address = address.replace(/\/$/, "");
    this.#headers = secret === null ? {} : { authorization: `Bearer ${secret.trim()}` };
    this.#policy = policy;
    this.#retryMs = 1000 * retryS;
    this.#tell = tell;
    this.#dial();
  }

  /** A promise of the action for an observation; rejects with a RefusedError where there is none. */
  async act(observation, { session = "default", reward = null, policy = this.#policy } = {}) {
    const name = await this.#named(policy);
    const known = this.#session(name, session);
    const acted = known.turn.then(async () => {
      const fields = { policy: name, observation, session, begins: !known.hasBegun };
      try {
        const { action } = await this.#ask(reward === null ? fields : { ...fields, reward });
        known.hasBegun = true;
        return action;
      } catch (error) {
        known.hasBegun = !fields.begins && error.status !== 504;
        throw error;
      }
    });
    known.turn = acted.catch(() => {});
    return acted;
  }

  /** Begin an episode with the session's next observation. */
  async reset(session = "default", policy = this.#policy) {
    const known = this.#session(await this.#named(policy), session);
    await known.turn;
    known.hasBegun = false;
  }

  /** Leave: the server forgets this client's sessions. */
  async close() {
    this.#end(new RefusedError(503, "this client is closed"));
    const socket = this.#socket;
    if (socket === null) return;
    const closed = new Promise((resolve) => socket.addEventListener("close", resolve));
    socket.close(1000);
    await closed;
  }

  #session(name, session) {
    const key = JSON.stringify([name, session]);
    if (!this.#sessions.has(key)) this.#sessions.set(key, { hasBegun: false, turn: Promise.resolve() });
    return this.#sessions.get(key);
  }

  /** A promise of the name of the policy that is asked for, once the server has said which there are. */
  async #named(policy) {
    if (this.#ending !== null) throw this.#ending;
    if (this.#policies === null) await new Promise((resolve, reject) => this.#whenKnown.push({ resolve, reject }));
    const names = Object.keys(this.#policies);
    const name = policy ?? (names.length === 1 ? names[0] : undefined);
    if (!names.includes(name)) throw new RefusedError(404, `no policy '${name}' is served; served: ${names.join(", ")}`);
    return name;
  }

  /** A promise of the answer to a message. */
  #ask(fields) {
    const id = ++this.#number;
    const text = JSON.stringify({ id, ...fields });
    return new Promise((resolve, reject) => {
      if (this.#ending !== null) return reject(this.#ending);
      const again = fields.session === null || !this.#policies[fields.policy]?.has_memory;
      this.#asked.set(id, { text, resolve, reject, isSent: this.#socket !== null, again });
      this.#socket?.send(text);
    });
  }

  #end(error) {
    this.#ending ??= error;
    for (const { reject } of [...this.#asked.values(), ...this.#whenKnown.splice(0)]) reject(error);
    this.#asked.clear();
  }

  #dial() {
    const socket = new WebSocket(`ws${this.#address.slice(4)}/v1/stream`, { headers: this.#headers });
    socket.addEventListener("open", () => socket.send(JSON.stringify({ hello: PROTOCOL, client: this.#name })));
    socket.addEventListener("message", ({ data }) => this.#take(socket, JSON.parse(data)));
    // Of a connection that can't be made, Node 20 tells the error alone.
    const lost = new Promise((resolve) => ["error", "close"].forEach((kind) => socket.addEventListener(kind, resolve)));
    lost.then(() => this.#dialAgain(socket));
  }

  #take(socket, { id, error, status, ...fields }) {
    if (this.#ending !== null) return;
    if (fields.hello === PROTOCOL) {
      this.#policies = fields.policies;
      this.#socket = socket;
      this.#failures = 0;
      for (const [id, asked] of this.#asked) {
        if (asked.isSent && !asked.again) {
          this.#asked.delete(id);
          asked.reject(new RefusedError(504, "the connection broke while a request was under way"));
        } else {
          asked.isSent = true;
          socket.send(asked.text);
        }
      }
      for (const { resolve } of this.#whenKnown.splice(0)) resolve();
    } else if (this.#socket !== socket) {
      this.#end(new RefusedError(status ?? 426, error ?? "this server speaks another protocol"));
      socket.close();
    } else if (this.#asked.has(id)) {
      const { resolve, reject } = this.#asked.get(id);
      this.#asked.delete(id);
      if (error === undefined) resolve(fields);
      else reject(new RefusedError(status, error));
    }
  }

  async #dialAgain(socket) {
    if (this.#socket === socket) {
      this.#socket = null;
      this.#lostAt = Date.now();
    }
    if (this.#ending !== null) return;
    // A WebSocket that is refused does not say why.
    const { status } = await fetch(`${this.#address}/v1/policies`, { headers: this.#headers }).catch(() => ({}));
    if (this.#ending !== null) return;
    if (status === 401) return this.#end(new RefusedError(401, `the server at ${this.#address} has another secret`));
    if (Date.now() - this.#lostAt > this.#retryMs) {
      return this.#end(new RefusedError(503, `the server at ${this.#address} is away for ${this.#retryMs / 1000} s`));
    }
    this.#tell(`the server at ${this.#address} is away; it is dialled again`);
    setTimeout(() => this.#ending ?? this.#dial(), Math.min(FIRST_PAUSE_MS * 2 ** this.#failures++, LONGEST_PAUSE_MS));
  }
}
