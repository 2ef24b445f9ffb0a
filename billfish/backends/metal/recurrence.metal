// marlin_recurrence: the state S [VALUE, KEY] of each head through the tokens of a sequence,
//
//   S = decay S + d k^T,  out = S q,  d = beta (v - decay S k) for the delta rule (DELTA), beta v for Mamba-2.
//
// q, k [tokens, KEY_HEADS, KEY], v, out [tokens, HEADS, VALUE], decay, beta [tokens, HEADS], all float. Rows of S do not depend on each
// other: a simdgroup has one of them in registers, and memory moves each state once for all tokens. Grid (32, VALUE, HEADS).
constexpr int numbers = (KEY + 31) / 32;
const int lane = thread_position_in_grid.x, row = thread_position_in_grid.y, head = thread_position_in_grid.z;
const int shared_head = TILED ? head % KEY_HEADS : head / (HEADS / KEY_HEADS);
const long at = (long(head) * VALUE + row) * KEY;
float s[numbers];
for (int i = 0; i < numbers; i++) s[i] = i * 32 + lane < KEY ? state[at + i * 32 + lane] : 0.0f;
for (int token = 0; token < tokens[0]; token++) {
  const long keys = (long(token) * KEY_HEADS + shared_head) * KEY, value = (long(token) * HEADS + head) * VALUE + row;
  const float kept = decay[long(token) * HEADS + head];
  float recalled = 0.0f, seen = 0.0f, own[numbers];
  for (int i = 0; i < numbers; i++) {
    const int column = i * 32 + lane;
    own[i] = column < KEY ? k[keys + column] : 0.0f;
    s[i] *= kept;
    recalled += s[i] * own[i];
  }
  const float d = beta[long(token) * HEADS + head] * (DELTA ? v[value] - simd_sum(recalled) : v[value]);
  for (int i = 0; i < numbers; i++) {
    const int column = i * 32 + lane;
    s[i] += own[i] * d;
    seen += column < KEY ? s[i] * q[keys + column] : 0.0f;
  }
  seen = simd_sum(seen);
  if (lane == 0) out[value] = seen;
}
for (int i = 0; i < numbers; i++)
  if (i * 32 + lane < KEY) after[at + i * 32 + lane] = s[i];
