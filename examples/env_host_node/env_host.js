// A host of CartPole environments. `node env_host.js --connect tcp://127.0.0.1:7010`; see README.md.

import { readFileSync } from "node:fs";
import os from "node:os";
import { parseArgs } from "node:util";
import { ACTION_SPACE, CartPoleLane, OBSERVATION_SPACE } from "./cartpole.js";
import { dial, isLocal, listen, readAddress, told } from "./serve.js";
import { Session, shareOut } from "./session.js";
import { cut } from "./wire.js";

const USAGE = `usage: node env_host.js (--connect ADDRESS | --listen ADDRESS) [--secret-file FILE]
    [--num-envs 4] [--lanes 2] [--name NAME] [--retry-s 60]
ADDRESS is tcp://host:port, tcp://[ipv6]:port or unix:/path`;

/** A secret's text, without white space at its ends: what a gateway makes of the same text. */
function readSecret(path) {
  const text = new TextDecoder("utf-8", { fatal: true }).decode(readFileSync(path)).trim();
  if (text === "") throw new Error(`${path} is empty, expected a secret`);
  return text;
}

function readOptions() {
  const { values } = parseArgs({
    options: {
      connect: { type: "string" },
      listen: { type: "string" },
      "secret-file": { type: "string" },
      "num-envs": { type: "string", default: "4" },
      lanes: { type: "string", default: "2" },
      name: { type: "string", default: `${os.hostname()}-${process.pid}` },
      "retry-s": { type: "string", default: "60" },
    },
  });
  const numEnvs = Number(values["num-envs"]);
  const lanes = Number(values.lanes);
  const retryS = Number(values["retry-s"]);
  const isOne = (values.connect === undefined) !== (values.listen === undefined);
  if (!isOne) throw new Error("expected either --connect or --listen");
  const areCounts = Number.isSafeInteger(numEnvs) && Number.isSafeInteger(lanes) && 1 <= lanes && lanes <= numEnvs;
  if (!areCounts) throw new Error(`${numEnvs} environments in ${lanes} lanes, expected one or more in each`);
  if (!(retryS >= 0)) throw new Error(`--retry-s is ${values["retry-s"]}, expected seconds`);
  const address = readAddress(values.connect ?? values.listen);
  const secret = values["secret-file"] === undefined ? null : readSecret(values["secret-file"]);
  if (values.listen !== undefined && secret === null && !isLocal(address)) {
    throw new Error(`--listen ${values.listen} without a secret: anybody could step these environments`);
  }
  const name = cut(values.name, 256);
  return { address, isListening: values.listen !== undefined, secret, numEnvs, lanes, name, retryS };
}

async function main() {
  let options;
  try {
    options = readOptions();
  } catch (error) {
    console.error(`${error.message}\n${USAGE}`);
    return 2;
  }
  const tell = (line) => console.error(`${options.name}: ${line}`);
  const slots = shareOut(options.numEnvs, options.lanes);
  const session = new Session(slots.map((count) => [count, new CartPoleLane(count)]));
  const host = {
    description: {
      software: `rollflow-env-host, node ${process.version}`,
      name: options.name,
      observationSpace: OBSERVATION_SPACE,
      actionSpace: ACTION_SPACE,
      autoreset: "SAME_STEP",
      metadata: { env: "CartPole-v1" },
    },
    secret: options.secret,
    maxFrame: 64 << 20,
    handshakeS: 10,
    tell,
  };
  const stop = new AbortController();
  for (const name of ["SIGINT", "SIGTERM"]) process.once(name, () => stop.abort());
  const serve = options.isListening ? listen : dial;
  try {
    const ending = await serve(options.address, session, host, { retryS: options.retryS, signal: stop.signal });
    tell(told(ending));
    return ending.how === "goodbye" ? 0 : 1;
  } catch (error) {
    if (error.syscall === undefined) throw error;
    tell(error.message); // the address can't be listened on
    return 1;
  }
}

process.exitCode = await main();
