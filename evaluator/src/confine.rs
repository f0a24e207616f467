//! The last step before foreign code runs: this process gives up what it can reach, and becomes the program.
//!
//! `harmonia-ci confine SPEC PROGRAM …` is started by [`crate::sandbox`], where it can inside namespaces of its own. What the
//! kernel lacks is left out and told (a report, if there is no program), never silently.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, NetPort, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The newest rules of Landlock that are asked for; a kernel that knows fewer enforces those.
const LANDLOCK: ABI = ABI::V6;
/// All up to it.
const VERSIONS: [ABI; 6] = [ABI::V1, ABI::V2, ABI::V3, ABI::V4, ABI::V5, LANDLOCK];
/// TCP came with the fourth version.
const FIRST_WITH_TCP: u8 = 4;
/// Where programs look up who they are.
const PASSWD: &str = "/etc/passwd";
/// Open files: Nix keeps a few hundred.
const FILES: u64 = 4096;

/// What a child may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Files and directories that it reads,
    pub read: Vec<PathBuf>,
    /// and writes.
    pub write: Vec<PathBuf>,
    /// An empty directory on which the new root is built; None: there are no namespaces.
    pub root: Option<PathBuf>,
    /// The user and group to become.
    pub user: Option<u32>,
    /// The only TCP port that it connects to; None: whatever it wants.
    pub port: Option<u16>,
    /// Bytes of memory of one process.
    pub memory: u64,
    /// Processes and threads, if they can be counted apart from others'.
    pub processes: Option<u64>,
    /// Bytes of one file.
    pub file: u64,
}

/// What is in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Files are hidden by a mount namespace, processes by another.
    pub namespaces: bool,
    /// It is another user.
    pub user: bool,
    /// Files are out of reach by Landlock, in this version of its rules,
    pub landlock: Option<u8>,
    /// and all addresses but the proxy's.
    pub network: bool,
    /// Calls that nobody needs are refused.
    pub seccomp: bool,
}

/// Why nothing was started.
#[derive(Debug, Error)]
pub enum ConfineError {
    /// Not what the evaluator writes.
    #[error("this command is the evaluator's own: it is not for people")]
    Spec(#[from] serde_json::Error),
    /// A step failed that should not.
    #[error("a child cannot be confined ({0})")]
    Step(&'static str, #[source] io::Error),
    /// Landlock said no.
    #[error("a child cannot be confined by Landlock")]
    Landlock(#[from] landlock::RulesetError),
    /// The filter cannot be made or loaded.
    #[error("a child cannot be confined by seccomp")]
    Seccomp(#[from] seccompiler::Error),
    /// The filter cannot be made.
    #[error("a child cannot be confined by seccomp")]
    Filter(#[from] seccompiler::BackendError),
    /// The program is not there, for one.
    #[error(
        "{0} cannot be started: install it, or set HARMONIA_CI_NIX_BIN to the directory that has Nix's programs"
    )]
    Start(String, #[source] io::Error),
}

/// Confines this thread and becomes the program; without one, writes what is in force.
pub fn confine(spec: &str, program: &[OsString]) -> Result<(), ConfineError> {
    let spec: Spec = serde_json::from_str(spec)?;
    let mut report =
        Report { namespaces: spec.root.is_some(), user: spec.user.is_some(), ..Report::default() };
    if let Some(root) = &spec.root {
        change_root(root, &spec).map_err(|error| ConfineError::Step("a root of its own", error))?;
    }
    limit(&spec).map_err(|error| ConfineError::Step("limits", error.into()))?;
    become_user(spec.user).map_err(|error| ConfineError::Step("another user", error.into()))?;
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| ConfineError::Step("no new privileges", error.into()))?;
    (report.landlock, report.network) = landlock(&spec)?;
    report.seccomp = seccomp(spec.port.is_some())?;
    let Some((name, arguments)) = program.split_first() else {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    };
    let mut command = Command::new(name);
    command.args(arguments);
    let failed = |error| ConfineError::Start(name.to_string_lossy().into_owned(), error);
    if spec.root.is_none() {
        return Err(failed(command.exec()));
    }
    // The first process of a PID namespace is spared by most signals: a broken pipe, a file that is too large. So it only waits, and
    // all the others end with it.
    let status = command.status().map_err(failed)?;
    std::process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()))
}

/// A root with nothing in it but what the specification names.
fn change_root(root: &Path, spec: &Spec) -> io::Result<()> {
    let place = std::env::current_dir()?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let quiet = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", root, "tmpfs", quiet, c"mode=0755,size=16m")?;
    let accounts = accounts(spec);
    for path in spec.read.iter().filter(|path| accounts.is_none() || *path != Path::new(PASSWD)) {
        show(root, path, true)?;
    }
    if let Some(text) = accounts {
        fs::create_dir_all(root.join("etc"))?;
        fs::write(root.join("etc/passwd"), text)?;
    }
    for path in &spec.write {
        show(root, path, false)?;
    }
    let proc = root.join("proc");
    fs::create_dir_all(&proc)?;
    rustix::mount::mount("proc", &proc, "proc", quiet | MountFlags::NOEXEC, None)?;
    rustix::process::chdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir(&place)?;
    Ok(())
}

/// The machine's accounts, and the user's that is none of them: ssh does nothing for somebody without a name. None: all is well.
fn accounts(spec: &Spec) -> Option<String> {
    let user = spec.user.filter(|_| spec.read.iter().any(|path| path == Path::new(PASSWD)))?;
    let text = fs::read_to_string(PASSWD).ok()?;
    let mut ids = text.lines().filter_map(|line| line.split(':').nth(2)?.parse::<u32>().ok());
    if ids.any(|id| id == user) {
        return None;
    }
    let home = spec.write.first().map(|place| place.join("home")).unwrap_or_default();
    Some(format!("{}\nevaluation:x:{user}:{user}::{}:/bin/sh\n", text.trim_end(), home.display()))
}

/// The same file or directory at the same place. What is not there is not shown.
fn show(root: &Path, path: &Path, only_read: bool) -> io::Result<()> {
    let target = root.join(path.strip_prefix("/").unwrap_or(path));
    let (Ok(link), Ok(file)) = (path.symlink_metadata(), path.metadata()) else { return Ok(()) };
    // Of two paths one may lie in the other.
    if target.symlink_metadata().is_ok() && !file.is_dir() {
        return Ok(());
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    if link.is_symlink() && file.is_dir() {
        return match symlink(fs::read_link(path)?, &target) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        };
    }
    if file.is_dir() {
        fs::create_dir_all(&target)?;
    } else {
        fs::write(&target, "")?;
    }
    rustix::mount::mount_bind_recursive(path, &target)?;
    if only_read && !path.starts_with("/dev") {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        // In a user namespace the flags of other file systems are not ours to change; Landlock refuses to write as well.
        let _ = rustix::mount::mount_remount(&target, flags, "");
    }
    Ok(())
}

fn limit(spec: &Spec) -> rustix::io::Result<()> {
    let most = |most: u64| Rlimit { current: Some(most), maximum: Some(most) };
    // Twice of what the watch allows for all processes together: it is the watch that has a sentence.
    setrlimit(Resource::Data, most(spec.memory.saturating_mul(2)))?;
    setrlimit(Resource::Fsize, most(spec.file))?;
    setrlimit(Resource::Core, most(0))?;
    let files = rustix::process::getrlimit(Resource::Nofile).maximum.map_or(FILES, |hard| hard.min(FILES));
    setrlimit(Resource::Nofile, most(files))?;
    match spec.processes {
        Some(processes) => setrlimit(Resource::Nproc, most(processes)),
        None => Ok(()),
    }
}

/// Without any capability, whoever it is: root's programs would get them back.
fn become_user(user: Option<u32>) -> rustix::io::Result<()> {
    let bits = CapabilitiesSecureBits::NO_ROOT | CapabilitiesSecureBits::NO_ROOT_LOCKED;
    // Who has no capabilities may not say so, and need not.
    let _ = rustix::thread::set_capabilities_secure_bits(bits);
    if let Some(id) = user {
        let (uid, gid) = (rustix::process::Uid::from_raw(id), rustix::process::Gid::from_raw(id));
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    }
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    )
}

/// In which version files are out of reach, and whether addresses are.
fn landlock(spec: &Spec) -> Result<(Option<u8>, bool), ConfineError> {
    let read = AccessFs::from_read(LANDLOCK);
    let write = AccessFs::from_all(LANDLOCK);
    let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort).handle_access(write)?;
    let rules = rules.scope(Scope::AbstractUnixSocket | Scope::Signal)?;
    let rules = match spec.port {
        Some(_) => rules.handle_access(AccessNet::BindTcp | AccessNet::ConnectTcp)?,
        None => rules,
    };
    let proc = [PathBuf::from("/proc")];
    let mut rules = rules
        .create()?
        .add_rules(path_beneath_rules(spec.read.iter().filter(|path| !is_device(path)), read))?
        .add_rules(path_beneath_rules(proc, read))?
        .add_rules(path_beneath_rules(spec.read.iter().filter(|path| is_device(path)), write))?
        .add_rules(path_beneath_rules(&spec.write, write))?;
    if let Some(port) = spec.port {
        rules = rules.add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
    }
    let enforced = rules.restrict_self()?;
    let version = match enforced.landlock {
        LandlockStatus::Available { effective_abi, .. } => {
            VERSIONS.iter().rposition(|abi| *abi <= effective_abi)
        }
        _ => None,
    };
    let version = version.filter(|_| enforced.ruleset != RulesetStatus::NotEnforced);
    let version = version.and_then(|before| u8::try_from(before + 1).ok());
    Ok((version, spec.port.is_some() && version >= Some(FIRST_WITH_TCP)))
}

fn is_device(path: &Path) -> bool {
    path.starts_with("/dev")
}

/// Calls of which neither Nix nor git has need. False: not on this machine.
fn seccomp(only_tcp: bool) -> Result<bool, ConfineError> {
    let Ok(arch) = std::env::consts::ARCH.try_into() else { return Ok(false) };
    let errno = |number: i32| SeccompAction::Errno(number.unsigned_abs());
    let refused = SeccompFilter::new(refused(only_tcp)?, SeccompAction::Allow, errno(libc::EPERM), arch)?;
    // Its flags are out of a filter's sight; without it, libraries use the older call.
    let unknown = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let unknown = SeccompFilter::new(unknown, SeccompAction::Allow, errno(libc::ENOSYS), arch)?;
    for filter in [refused, unknown] {
        seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    }
    Ok(true)
}

fn refused(only_tcp: bool) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let calls = [
        libc::SYS_acct,
        libc::SYS_add_key,
        libc::SYS_bpf,
        libc::SYS_chroot,
        libc::SYS_clock_settime,
        libc::SYS_delete_module,
        libc::SYS_finit_module,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fsopen,
        libc::SYS_fspick,
        libc::SYS_init_module,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_io_uring_setup,
        libc::SYS_kexec_file_load,
        libc::SYS_kexec_load,
        libc::SYS_keyctl,
        libc::SYS_mount,
        libc::SYS_mount_setattr,
        libc::SYS_move_mount,
        libc::SYS_name_to_handle_at,
        libc::SYS_open_by_handle_at,
        libc::SYS_open_tree,
        libc::SYS_perf_event_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_pivot_root,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_ptrace,
        libc::SYS_quotactl,
        libc::SYS_reboot,
        libc::SYS_request_key,
        libc::SYS_setdomainname,
        libc::SYS_sethostname,
        libc::SYS_setns,
        libc::SYS_settimeofday,
        libc::SYS_swapoff,
        libc::SYS_swapon,
        libc::SYS_syslog,
        libc::SYS_umount2,
        libc::SYS_unshare,
        libc::SYS_userfaultfd,
    ];
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.into_iter().map(|call| (call, Vec::new())).collect();
    let argument = |index, operator, value: i32| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, u64::from(value.unsigned_abs()))
    };
    // A namespace of its own would give it capabilities there, and the kernel more to defend.
    let masked = |flag: i32| SeccompCmpOp::MaskedEq(u64::from(flag.unsigned_abs()));
    let spaces = [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWNET, libc::CLONE_NEWPID];
    let clone = spaces.iter().map(|&flag| SeccompRule::new(vec![argument(0, masked(flag), flag)?]));
    rules.insert(libc::SYS_clone, clone.collect::<Result<_, _>>()?);
    // Of sockets: local ones, TCP, and netlink, with which libraries list addresses. What is not TCP could pass by the proxy.
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let other = families
        .iter()
        .map(|&family| argument(0, SeccompCmpOp::Ne, family))
        .collect::<Result<Vec<_>, _>>()?;
    let mut socket = vec![SeccompRule::new(other)?];
    if only_tcp {
        for family in [libc::AF_INET, libc::AF_INET6] {
            for kind in [libc::SOCK_DGRAM, libc::SOCK_RAW] {
                // Of the type, the lower bits are the kind.
                let kind = argument(1, SeccompCmpOp::MaskedEq(0xf), kind)?;
                socket.push(SeccompRule::new(vec![argument(0, SeccompCmpOp::Eq, family)?, kind])?);
            }
        }
    }
    rules.insert(libc::SYS_socket, socket);
    Ok(rules)
}
