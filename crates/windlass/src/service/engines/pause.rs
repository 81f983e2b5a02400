//! How an engine is paused and what happens to its caches: the table of exact calls.
//!
//! Owns: [`PauseMode`], [`CachePolicy`], and what each pair means to each engine that is driven by its own routes. An
//! engine with our plugin is told the pair and does the same inside.
//!
//! | engine | mode | cache | before the load | after it |
//! |---|---|---|---|---|
//! | vLLM | keep | reset | `/pause?mode=keep&clear_cache=true` | `/reset_prefix_cache?reset_running_requests=true`, `/resume` |
//! | vLLM | keep | keep | `/pause?mode=keep&clear_cache=false` | `/resume` |
//! | vLLM | wait, abort | reset | `/pause?mode=…&clear_cache=true` | `/reset_prefix_cache?reset_running_requests=false`, `/resume` |
//! | vLLM | wait, abort | keep | `/pause?mode=…&clear_cache=false` | `/resume` |
//! | SGLang with our loader | keep, abort | reset | `/pause_generation {retract}`, `{abort}` | `/flush_cache`, `/continue_generation` |
//! | SGLang with our loader | keep, abort | keep | `/pause_generation {in_place}`, `{abort}` | `/continue_generation` |
//! | SGLang | keep | reset | `/pause_generation {retract}` | update with `flush_cache: true`, `/continue_generation` |
//! | SGLang | keep | keep | `/pause_generation {in_place}` | update with `flush_cache: false`, `/continue_generation` |
//! | SGLang | abort | either | `/pause_generation {abort}` | update with `flush_cache` as wanted, `/continue_generation` |
//! | SGLang | wait | either | nothing: the update itself waits until no request is running | update with `flush_cache` as wanted |
//!
//! A program may name SGLang's mode itself ([`Halt`]): `retract` with a cache that is kept.
//!
//! With `keep`, requests in flight are frozen and go on with the new weights: one answer may span two versions. If the
//! cache is reset, what they have computed so far is computed again with the new weights; if it is kept, they go on
//! from what the old weights left.

use serde::{Deserialize, Serialize};

/// What becomes of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Freeze requests and continue them with the new weights; the shortest pause
    Keep,
    /// Finish requests first
    Wait,
    /// Abort requests; clients get the tokens generated so far
    Abort,
}

/// What becomes of cached prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum CachePolicy {
    /// Reset the cache: no new request uses prefixes that the old weights computed
    Reset,
    /// Keep the cache: new requests may reuse prefixes that the old weights computed
    Keep,
}

/// The query of vLLM's `/pause`.
pub(super) fn vllm_pause(mode: PauseMode, cache: CachePolicy) -> String {
    let mode = match mode {
        PauseMode::Keep => "keep",
        PauseMode::Wait => "wait",
        PauseMode::Abort => "abort",
    };
    let clear = match cache {
        CachePolicy::Reset => "true",
        CachePolicy::Keep => "false",
    };
    format!("/pause?mode={mode}&clear_cache={clear}")
}

/// How vLLM's prefix cache is reset after a load, if it is.
pub(super) fn vllm_reset(mode: PauseMode, cache: CachePolicy) -> Option<&'static str> {
    match (cache, mode) {
        (CachePolicy::Keep, PauseMode::Keep | PauseMode::Wait | PauseMode::Abort) => None,
        // Frozen requests hold blocks, without which the cache cannot be reset: they give them up and compute them
        // again.
        (CachePolicy::Reset, PauseMode::Keep) => Some("/reset_prefix_cache?reset_running_requests=true"),
        (CachePolicy::Reset, PauseMode::Wait | PauseMode::Abort) => {
            Some("/reset_prefix_cache?reset_running_requests=false")
        }
    }
}

/// The mode of SGLang's `/pause_generation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Halt {
    /// Requests go back to the queue; what they computed so far is computed again.
    Retract,
    /// Requests freeze and keep their blocks, so that the cache cannot be flushed.
    InPlace,
    /// Requests end.
    Abort,
}

/// The mode of SGLang's `/pause_generation`, if it is called.
pub(super) fn sglang_pause(mode: PauseMode, cache: CachePolicy) -> Option<Halt> {
    match (mode, cache) {
        (PauseMode::Keep, CachePolicy::Reset) => Some(Halt::Retract),
        (PauseMode::Keep, CachePolicy::Keep) => Some(Halt::InPlace),
        (PauseMode::Abort, CachePolicy::Reset | CachePolicy::Keep) => Some(Halt::Abort),
        (PauseMode::Wait, CachePolicy::Reset | CachePolicy::Keep) => None,
    }
}
