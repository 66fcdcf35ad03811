import assert from "node:assert/strict";
import { test } from "node:test";
import { CartPoleLane, Generator } from "../cartpole.js";
import { isOver, nextState } from "../physics.js";
import { NdArray } from "../wire.js";

const listOf = (array) => Array.from(array.items);

test("a cart at rest that is pushed moves one step later", () => {
  const [position, velocity, angle, turning] = nextState([0, 0, 0, 0], 1);
  assert.deepEqual([position, angle], [0, 0]);
  const turn = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1)); // θ'' where sin θ = 0 and cos θ = 1
  assert.ok(Math.abs(turning - 0.02 * turn) < 1e-15);
  assert.ok(Math.abs(velocity - 0.02 * (10 / 1.1 - (0.05 * turn) / 1.1)) < 1e-15);
});

test("an episode is over beyond 2.4, and beyond 12 degrees", () => {
  const degree = Math.PI / 180;
  assert.deepEqual([2.3, -2.41, 2.41].map((position) => isOver([position, 9, 0, 9])), [false, true, true]);
  assert.deepEqual([11.9, -12.1, 12.1].map((angle) => isOver([0, 9, angle * degree, 9])), [false, true, true]);
});

test("splitmix64 of seed 1234567 gives what its authors' program gives", () => {
  const generator = new Generator(1234567n);
  const bits = [6457827717110365317n, 3203168211198807973n, 9817491932198370423n];
  for (const expected of bits) assert.equal(generator.next(), Number(expected >> 11n) * 2 ** -53);
});

test("a seed gives the same state again, another gives another, all within 0.05", () => {
  const lane = new CartPoleLane(2);
  const first = listOf(lane.reset([1n, 2n]).obs);
  assert.deepEqual(listOf(lane.reset([1n, 2n]).obs), first);
  assert.notDeepEqual(first.slice(0, 4), first.slice(4));
  assert.notDeepEqual(listOf(lane.reset(null).obs), first);
  for (let seed = 0n; seed < 100n; seed += 1n) {
    assert.ok(listOf(lane.reset([seed, -seed]).obs).every((value) => Math.abs(value) <= 0.05));
  }
});

test("a slot that ends is reset in the same step, and its last observation is told", () => {
  const lane = new CartPoleLane(2);
  lane.reset([3n, 4n]);
  let rows;
  let steps = 0;
  do {
    rows = lane.step([1, steps % 2]);
    steps += 1;
    assert.deepEqual(listOf(rows.rewards), [1, 1]);
    assert.deepEqual(listOf(rows.truncateds), [0, 0]);
  } while (rows.final_obs === null);
  assert.ok(steps > 5 && steps < 15);
  assert.deepEqual(listOf(rows.terminateds), [1, 0]);
  assert.deepEqual(rows.final_slots, [0]);
  assert.deepEqual(rows.final_obs.shape, [1, 4]);
  assert.ok(isOver(listOf(rows.final_obs)));
  assert.ok(listOf(rows.obs).slice(0, 4).every((value) => Math.abs(value) <= 0.05));
});

test("a pole that is held up is cut off after 500 steps", () => {
  const lane = new CartPoleLane(1);
  let [, , angle, turning] = listOf(lane.reset([5n]).obs);
  for (let step = 1; step <= 500; step += 1) {
    const rows = lane.step([angle + turning > 0 ? 1 : 0]);
    assert.deepEqual([listOf(rows.terminateds), listOf(rows.truncateds)], [[0], [step === 500 ? 1 : 0]]);
    [, , angle, turning] = listOf(rows.obs);
  }
});

test("actions that don't fit are refused", () => {
  const lane = new CartPoleLane(2);
  const actions = (dtype, shape, items) => () => lane.checkActions(new NdArray(dtype, shape, items));
  assert.deepEqual(actions("<i8", [2], BigInt64Array.of(1n, 0n))(), [1, 0]);
  for (const wrong of [
    actions("<i8", [2], BigInt64Array.of(1n, 2n)),
    actions("<i8", [1], BigInt64Array.of(1n)),
    actions("<i8", [2, 1], BigInt64Array.of(1n, 0n)),
    actions("<i4", [2], Int32Array.of(1, 0)),
    () => lane.checkActions([1, 0]),
  ]) {
    assert.throws(wrong, { code: "request" });
  }
});
