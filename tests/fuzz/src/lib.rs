//! Fuzz targets: one for each format in which others speak to harmonia-ci. A target panics if it finds a fault.
//!
//! `./dev test fuzz` runs them under libFuzzer, which mutates the inputs of `corpus/` and keeps what reaches new
//! code. The stable compiler can instrument for that, though not for address sanitizers, which safe code does
//! not need. Without libFuzzer this is a library whose tests read the corpus once.

mod body;
mod daemon;
mod derivation;
mod listing;
mod narinfo;
mod word;

// These two files alone: their crates come with the SDK of S3, all of which would be built once more, instrumented.
#[path = "../../../frontend/src/key.rs"]
pub mod key;
#[path = "../../../service/src/protocol.rs"]
pub mod protocol;

/// Reads one format.
#[derive(Debug)]
pub struct Target {
    /// Its name, and that of its directory in `corpus/`.
    pub name: &'static str,
    /// Reads an input.
    pub run: fn(&[u8]),
    /// The bytes that it may hold at any moment for an input of so many bytes.
    pub memory: fn(usize) -> usize,
}

/// All of them.
pub const TARGETS: [Target; 6] = [
    // Of a socket's buffers and a frame of a NAR, 64 KiB each.
    Target { name: "daemon", run: daemon::read, memory: |length| (512 << 10) + 32 * length },
    Target { name: "narinfo", run: narinfo::read, memory: |length| (64 << 10) + 32 * length },
    Target { name: "derivation", run: derivation::read, memory: |length| (64 << 10) + 32 * length },
    // Of buffers, whatever the input: see `harmonia_nix::pack`.
    Target { name: "listing", run: listing::read, memory: |length| (4 << 20) + 32 * length },
    Target { name: "body", run: body::read, memory: |length| (64 << 10) + 32 * length },
    Target { name: "word", run: word::read, memory: |length| (64 << 10) + 32 * length },
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_target_reads_its_corpus() {
        for target in &TARGETS {
            let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
            let inputs: Vec<_> = fs::read_dir(&corpus).expect(target.name).collect();
            assert!(!inputs.is_empty(), "{}", target.name);
            for input in inputs {
                (target.run)(&fs::read(input.expect(target.name).path()).expect(target.name));
            }
        }
    }
}
