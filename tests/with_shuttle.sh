#!/usr/bin/env bash
# What cargo runs in the place of rustc, for tests/schedules.sh.

exec "$@" --cfg shuttle -D warnings
