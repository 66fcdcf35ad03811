// Connections to a gateway, one after the other, until the run is over.

import net from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { Connection } from "./connection.js";

const FIRST_WAIT_S = 0.05;
const LONGEST_WAIT_S = 5;
const NOT_FINAL = ["session", "handshake", "silent", "busy"];

/** `{host, port}` or `{path}`, as node's sockets take them. */
export function readAddress(text) {
  if (text.startsWith("unix:") && text.length > 5) return { path: text.slice(5) };
  const [, bracketed, plain, port] = /^tcp:\/\/(?:\[([^\]]+)\]|([^:[\]/]+)):(\d+)$/.exec(text) ?? [];
  const isAddress = port !== undefined && Number(port) <= 65_535;
  if (!isAddress) throw new Error(`'${text}' is no address, expected tcp://host:port or unix:/path`);
  return { host: bracketed ?? plain, port: Number(port) };
}

/** Whether nobody on another machine can reach an address. */
export function isLocal({ path, host }) {
  return path !== undefined || ["localhost", "::1"].includes(host) || (net.isIPv4(host) && host.startsWith("127."));
}

const isFinal = ({ how, code }) => how === "goodbye" || (how === "refused" && !NOT_FINAL.includes(code));

/** How a connection ended, as a line for the user. */
export const told = ({ how, code, text }) => (how === "refused" ? `refused (${code}): ${text}` : `${how}: ${text}`);

/** Dial until the run is over: a promise of how it ended. Waits longer each time, `retryS` in all without a welcome. */
export async function dial(address, session, host, { retryS, signal }) {
  let wait = FIRST_WAIT_S;
  let lastSeen = Date.now();
  for (;;) {
    const stream = net.connect({ ...address, noDelay: true });
    const ending = await hold(stream, session, host, signal);
    if (isFinal(ending)) return ending;
    if (ending.code === "session") session.forget();
    if (ending.welcomed) {
      wait = FIRST_WAIT_S;
      lastSeen = Date.now();
    }
    if (Date.now() - lastSeen > retryS * 1000) return ending;
    host.tell(told(ending));
    // Not all hosts of a gateway that was started again should dial at the same moment.
    await sleep(wait * (0.5 + Math.random()) * 1000, undefined, { signal }).catch(() => {});
    if (signal.aborted) return { how: "goodbye", text: "the host was stopped" };
    wait = Math.min(2 * wait, LONGEST_WAIT_S);
  }
}

/** Be dialled, until the run of a gateway that has been welcomed is over: a promise of how it ended. */
export function listen(address, session, host, { signal }) {
  return new Promise((resolve, reject) => {
    const server = net.createServer({ noDelay: true }, async (stream) => {
      const ending = await hold(stream, session, host, signal);
      if (ending.code === "session" && session.connection === null) session.forget();
      if (ending.welcomed && isFinal(ending)) end(ending);
      else if (!signal.aborted) host.tell(told(ending)); // whoever had not proved the secret must not stop the host
    });
    const end = (ending) => {
      server.close();
      resolve(ending);
    };
    signal.addEventListener("abort", () => end({ how: "goodbye", text: "the host was stopped" }));
    server.on("error", reject);
    server.listen(address, () => {
      const { port } = server.address();
      host.tell(`listening on ${address.path ? `unix:${address.path}` : `tcp://${bracketed(address.host)}:${port}`}`);
    });
  });
}

const bracketed = (host) => (host.includes(":") ? `[${host}]` : host);

async function hold(stream, session, host, signal) {
  const connection = new Connection(stream, session, host);
  const stop = () => connection.goodbye("the host was stopped");
  if (signal.aborted) stop();
  signal.addEventListener("abort", stop);
  const ending = await connection.ended;
  signal.removeEventListener("abort", stop);
  return ending;
}
