//! Packs a path and says how fast and in how much memory: `pack PATH [WORKERS]`. Parts are dropped, four late: as
//! long as an upload would hold them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use harmonia_nix::pack::{Options, pack};
use nix_archive::nar::{CaseHack, encode_path};

struct Count(u64);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let path = PathBuf::from(arguments.next().ok_or("usage: pack PATH [WORKERS]")?);
    let workers = arguments.next().and_then(|workers| workers.to_str()?.parse().ok()).unwrap_or(2);
    let mut size = Count(0);
    encode_path(&mut size, &path, CaseHack::Disabled)?;
    let options = Options { workers, ..Options::for_nar(size.0) };
    let before = cpu()?;
    let start = Instant::now();
    let mut in_flight = VecDeque::new();
    let packed = pack(&path, &options, |part| {
        in_flight.push_back(part);
        if in_flight.len() > 4 {
            in_flight.pop_front();
        }
        ControlFlow::Continue(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    println!("nar    {} bytes, {}", packed.nar_size, packed.nar_hash);
    println!("file   {} bytes in {} parts", packed.file.size, packed.parts.len());
    println!("time   {seconds:.3} s, {:.0} MB/s", packed.nar_size as f64 / seconds / 1e6);
    println!("cpu    {:.2} s", cpu()? - before);
    println!("memory {} MB at most", status("VmHWM:")? / 1024);
    Ok(())
}

/// CPU seconds of this process so far; the kernel counts them in hundredths.
fn cpu() -> Result<f64, Box<dyn std::error::Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let ticks: u64 =
        fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 / 100.0)
}

fn status(key: &str) -> Result<u64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).ok_or("not in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
