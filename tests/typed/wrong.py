"""Mistakes that type checkers find: each line that is marked so, and no other.
tests/project/test_types.py checks it; it does not run.
"""

import flax.nnx
import jax

import jaxnorm as jn

rngs, key = flax.nnx.Rngs(0), jax.random.key(0)
x = jax.random.normal(key, (4, 5, 6))
m, params = jn.moments(x, -1), jn.recurrent.init_lstm(key, 6, 3)

jn.layer_norm(x, epsilom=1.0)  # error
jn.layer_norm(x, epsilon_in="sd")  # error
jn.layer_norm(x, implementation=3)  # error
jn.layer_norm("x")  # error
jn.layer_norm(x=x)  # error
jn.layer_nrom(x)  # error
jn.batch_norm(x).sum()  # error
jn.group_norm(x, 2.0)  # error
jn.standardize(x, "n t (g [c])", g="2")  # error
jn.plan(x, -1, epsilon_in="sd")  # error
jn.plan(x, -1).sum()  # error
jn.moments(x, centred=False)  # error
jn.merge(m, x)  # error
jn.merge([m, m])  # error
jn.ema(m, momentum=0.9)  # error
m.std()  # error
jn.recurrent.lstm(x, params, placment="sum")  # error
h, y, found = jn.recurrent.lstm(x, params)  # error
jn.recurrent.lstm(x, params, initial=x)  # error
jn.recurrent.gru(x, params, initial=(x, x))  # error
jn.recurrent.init_gru(key, 6, 3, forget_bias=1.0)  # error
jn.linen.LayerNorm(epsilom=1.0)  # error
jn.linen.LSTM(4, num_layer=2)  # error
jn.linen.PositionalNorm()(x).sum()  # error
jn.linen.GRU(4)(x, return_carry=True).sum()  # error
jn.nnx.LayerNorm(6)  # error
jn.nnx.LayerNorm(6, epsilom=1.0, rngs=rngs)  # error
jn.nnx.RMSNorm(6, rounding="thrice", rngs=rngs)  # error
jn.rms_norm(x, scale=x, scale_offset="1")  # error
jn.nnx.GroupNorm(6, num_group=2, rngs=rngs)  # error
jn.nnx.PositionalNorm(6, epsilom=1.0, rngs=rngs)  # error
jn.nnx.LSTM(6, 3, forget_bais=0.0, rngs=rngs)  # error
jn.nnx.LayerNormLSTMCell(6, 3, rngs=rngs)(x, x)  # error
