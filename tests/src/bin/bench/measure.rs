//! Medians, percentiles, and the CPU and memory that processes have used.

use std::fs;
use std::time::Duration;

/// The middle one.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    quantile(&mut values.into_iter().collect::<Vec<_>>(), 0.5)
}

/// The value that a part `q` of all does not exceed.
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    assert!(!values.is_empty(), "nothing was measured");
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

/// The same of durations, in seconds.
pub fn latency(values: &[Duration], q: f64) -> f64 {
    quantile(&mut values.iter().map(Duration::as_secs_f64).collect::<Vec<_>>(), q)
}

/// CPU seconds of a postmaster and all its children so far, ended ones included.
pub fn cpu_of(postmaster: u32) -> f64 {
    let (own, ended) = ticks(postmaster).expect("PostgreSQL runs");
    let children = fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children"));
    let children = children.expect("the kernel lists children");
    // A child that ends meanwhile is counted among the ended the next time.
    let living: u64 =
        children.split_whitespace().filter_map(|pid| ticks(pid.parse().ok()?)).map(|t| t.0).sum();
    (own + ended + living) as f64 / 100.0
}

/// CPU seconds of a process so far, without its children.
pub fn cpu_of_process(pid: u32) -> f64 {
    ticks(pid).expect("the process runs").0 as f64 / 100.0
}

/// CPU seconds of this process's children that have ended, and of theirs.
pub fn cpu_of_children() -> f64 {
    ticks(std::process::id()).expect("this process runs").1 as f64 / 100.0
}

/// Peak memory of this process, in millions of bytes.
pub fn peak_mb() -> f64 {
    peak_mb_of(std::process::id())
}

/// Peak memory of a process, in millions of bytes.
pub fn peak_mb_of(pid: u32) -> f64 {
    memory(pid, "VmHWM:")
}

/// Memory of a process, in millions of bytes.
pub fn rss_mb_of(pid: u32) -> f64 {
    memory(pid, "VmRSS:")
}

fn memory(pid: u32, field: &str) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the kernel tells");
    let value = status.lines().find_map(|line| line.strip_prefix(field)).expect("a number of kB");
    let kib: f64 = value.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024.0 / 1e6
}

/// User and system time of a process, and of its children that have ended, in hundredths of a second.
fn ticks(pid: u32) -> Option<(u64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let fields: Vec<u64> =
        stat.rsplit_once(')')?.1.split_whitespace().skip(11).take(4).filter_map(|f| f.parse().ok()).collect();
    Some((fields.first()? + fields.get(1)?, fields.get(2)? + fields.get(3)?))
}
