// CartPole-v1, as a lane of slots that step together.

import { randomBytes } from "node:crypto";
import { Breach } from "./breach.js";
import { isOver, MAX_ANGLE, MAX_POSITION, nextState } from "./physics.js";
import { NdArray } from "./wire.js";

const MAX_STEPS = 500;
const START = 0.05;

const bytesOf = (...numbers) => new Uint8Array(new Float32Array(numbers).buffer);
const HIGH = [MAX_POSITION * 2, Infinity, MAX_ANGLE * 2, Infinity];

export const OBSERVATION_SPACE = {
  kind: "Box",
  low: ["<f4", [4], bytesOf(...HIGH.map((bound) => -bound))],
  high: ["<f4", [4], bytesOf(...HIGH)],
};
export const ACTION_SPACE = { kind: "Discrete", n: 2, start: 0, dtype: "<i8" };

/** Numbers in [0, 1) of a 64-bit seed: splitmix64. */
export class Generator {
  #state;

  constructor(seed = randomBytes(8).readBigUInt64LE()) {
    this.#state = BigInt.asUintN(64, seed);
  }

  next() {
    this.#state = BigInt.asUintN(64, this.#state + 0x9e3779b97f4a7c15n);
    let bits = this.#state;
    bits = BigInt.asUintN(64, (bits ^ (bits >> 30n)) * 0xbf58476d1ce4e5b9n);
    bits = BigInt.asUintN(64, (bits ^ (bits >> 27n)) * 0x94d049bb133111ebn);
    return Number((bits ^ (bits >> 31n)) >> 11n) * 2 ** -53;
  }
}

class CartPole {
  #generator = new Generator();

  reset(seed = null) {
    if (seed !== null) this.#generator = new Generator(seed);
    this.state = Array.from({ length: 4 }, () => (2 * this.#generator.next() - 1) * START);
    this.steps = 0;
  }

  step(action) {
    this.state = nextState(this.state, action);
    this.steps += 1;
    return { terminated: isOver(this.state), truncated: this.steps >= MAX_STEPS };
  }
}

/** Slots that are reset and stepped together, with autoreset in the same step. */
export class CartPoleLane {
  #slots;

  constructor(count) {
    this.#slots = Array.from({ length: count }, () => new CartPole());
  }

  /** What `step` takes, of a request's actions. */
  checkActions(actions) {
    const count = this.#slots.length;
    const fits = actions instanceof NdArray && actions.dtype === "<i8" && `${actions.shape}` === `${count}`;
    if (!fits) throw new Breach("request", `actions are no array <i8[${count}]`);
    return Array.from(actions.items, (action, slot) => {
      const isAction = action === 0n || action === 1n;
      if (!isAction) throw new Breach("request", `the action of slot ${slot} is ${action}, expected 0 or 1`);
      return Number(action);
    });
  }

  reset(seeds) {
    this.#slots.forEach((env, slot) => env.reset(seeds?.[slot] ?? null));
    return {
      obs: observations(this.#slots.map((env) => env.state)),
      rewards: null,
      terminateds: null,
      truncateds: null,
      final_slots: [],
      final_obs: null,
      infos: {},
      final_infos: {},
    };
  }

  step(actions) {
    const ends = this.#slots.map((env, slot) => env.step(actions[slot]));
    const finalSlots = [...ends.keys()].filter((slot) => ends[slot].terminated || ends[slot].truncated);
    const finalStates = finalSlots.map((slot) => this.#slots[slot].state);
    for (const slot of finalSlots) this.#slots[slot].reset();
    return {
      obs: observations(this.#slots.map((env) => env.state)),
      rewards: new NdArray("<f8", [ends.length], new Float64Array(ends.length).fill(1)),
      terminateds: flags(ends.map((end) => end.terminated)),
      truncateds: flags(ends.map((end) => end.truncated)),
      final_slots: finalSlots,
      final_obs: finalSlots.length > 0 ? observations(finalStates) : null,
      infos: {},
      final_infos: {},
    };
  }
}

const observations = (states) => new NdArray("<f4", [states.length, 4], Float32Array.from(states.flat()));
const flags = (values) => new NdArray("|b1", [values.length], Uint8Array.from(values));
