//! Runs the target that `HARMONIA_CI_FUZZ` names under libFuzzer, and ends the process if it takes more memory than it may.

#![no_main]

use std::alloc::System;
use std::sync::LazyLock;

use cap::Cap;
use harmonia_fuzz::{TARGETS, Target};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("HARMONIA_CI_FUZZ").unwrap_or_default();
    TARGETS.iter().find(|target| target.name == name).expect("HARMONIA_CI_FUZZ is the name of no target")
});

libfuzzer_sys::fuzz_target!(init: report_without_limit(), |input: &[u8]| {
    limit(MEMORY.allocated() + (TARGET.memory)(input.len()));
    (TARGET.run)(input);
    limit(usize::MAX);
});

fn limit(bytes: usize) {
    MEMORY.set_limit(bytes).expect("what is allocated fits");
}

/// A backtrace takes more memory than any target.
fn report_without_limit() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        limit(usize::MAX);
        report(panic);
    }));
}
