// Episodes of CartPole, played by a policy that is served. `node play.js --connect ADDRESS`; see README.md.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { isOver, nextState } from "../env_host_node/physics.js";
import { PolicyClient } from "./policy_client.js";

const MOST_STEPS = 500;
const { values } = parseArgs({
  options: {
    connect: { type: "string" },
    "secret-file": { type: "string" },
    policy: { type: "string" },
    episodes: { type: "string", default: "10" },
  },
});
const secret = values["secret-file"] === undefined ? null : readFileSync(values["secret-file"], "utf8");
const client = new PolicyClient(values.connect, { secret, policy: values.policy, tell: (line) => console.error(line) });

/** The length of an episode, in a session of its own. */
async function play(session) {
  let state = Array.from({ length: 4 }, () => 0.1 * Math.random() - 0.05);
  for (let step = 1; ; step += 1) {
    state = nextState(state, await client.act(state, { session }));
    if (isOver(state) || step === MOST_STEPS) return step;
  }
}

const lengths = await Promise.all(Array.from({ length: Number(values.episodes) }, (_, session) => play(session)));
console.log(JSON.stringify(lengths));
await client.close();
