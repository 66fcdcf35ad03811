// The physics and the limits of gymnasium's CartPole-v1.

const GRAVITY = 9.8;
const MASS_POLE = 0.1;
const MASS_TOTAL = MASS_POLE + 1.0;
const HALF_LENGTH = 0.5;
const POLE_MASS_LENGTH = MASS_POLE * HALF_LENGTH;
const FORCE = 10.0;
const SECONDS_PER_STEP = 0.02;
export const MAX_ANGLE = (12 * 2 * Math.PI) / 360;
export const MAX_POSITION = 2.4;

/** The state `[x, x', θ, θ']` after 0.02 s, pushed to the left (0) or to the right (1). */
export function nextState([position, velocity, angle, turning], action) {
  const force = action === 1 ? FORCE : -FORCE;
  const cos = Math.cos(angle);
  const sin = Math.sin(angle);
  const push = (force + POLE_MASS_LENGTH * turning ** 2 * sin) / MASS_TOTAL;
  const turn =
    (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - (MASS_POLE * cos ** 2) / MASS_TOTAL));
  const pull = push - (POLE_MASS_LENGTH * turn * cos) / MASS_TOTAL;
  return [
    position + SECONDS_PER_STEP * velocity,
    velocity + SECONDS_PER_STEP * pull,
    angle + SECONDS_PER_STEP * turning,
    turning + SECONDS_PER_STEP * turn,
  ];
}

/** Whether the cart has left the track or the pole has fallen. */
export const isOver = ([position, , angle]) => Math.abs(position) > MAX_POSITION || Math.abs(angle) > MAX_ANGLE;
