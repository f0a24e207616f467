//! Our pass over a path, and what its two expensive halves take alone.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use harmonia_nix::pack::{self, Options};

use super::ROUNDS;
use super::goods::Goods;
use crate::measure::median;

/// The time of the slower of `sha256sum` and `zstd -T0` on the NAR, over that of our pass.
pub async fn against_limit(goods: &Goods) -> f64 {
    tokio::task::block_in_place(|| {
        let (path, info) = goods.paths.iter().next().expect("a path");
        let real = goods.nix.real(&path.to_string());
        let nar = goods.nix.root().join("nar");
        let mut dump = goods.nix.command("nix-store");
        dump.arg("--dump").arg(&real).stdout(File::create(&nar).expect("make a file"));
        seconds(&mut dump);
        let options = Options { level: 3, ..Options::for_nar(info.nar_size) };
        let mut ratios = vec![];
        for round in 0..=ROUNDS {
            let hash = seconds(quiet("sha256sum", &[], &nar).stdout(Stdio::null()));
            let zstd = seconds(quiet("zstd", &["-T0", "-3", "-q", "-c"], &nar).stdout(Stdio::null()));
            let start = Instant::now();
            let packed = pack::pack(&real, &options, |_| ControlFlow::Continue(())).expect("pack");
            let ours = start.elapsed().as_secs_f64();
            assert_eq!(packed.nar_hash, info.nar_hash);
            eprintln!("   sha256sum {hash:.2} s, zstd -T0 {zstd:.2} s, our pass {ours:.2} s");
            if round > 0 {
                ratios.push(hash.max(zstd) / ours);
            }
        }
        std::fs::remove_file(nar).expect("remove the NAR");
        median(ratios)
    })
}

fn quiet(program: &str, arguments: &[&str], file: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).arg(file);
    command
}

fn seconds(command: &mut Command) -> f64 {
    let start = Instant::now();
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
    start.elapsed().as_secs_f64()
}
