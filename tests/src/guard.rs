//! Processes, directories and servers that vanish with the test process, however that ends.

use std::env;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use tokio::sync::oneshot;

/// Where `./dev` keeps what takes long to make.
pub fn cache() -> PathBuf {
    let base = env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    base.or_else(|| Some(env::home_dir()?.join(".cache"))).expect("a home directory").join("harmonia-ci")
}

/// A directory and at most one process that works in it.
pub(crate) struct Guard {
    directory: PathBuf,
    process: Mutex<Option<Child>>,
    shell: Child,
}

impl Guard {
    /// Makes the directory. Not below /tmp: a new Nix refuses to build where a parent directory is writable by
    /// everyone, and a file system in memory may lack the attributes in which an S3 server keeps its checksums.
    pub(crate) fn new(prefix: &str) -> Guard {
        let parent = cache().join("scratch");
        fs::create_dir_all(&parent).expect("make the directory of the directories");
        let permissions = fs::Permissions::from_mode(0o755);
        let directory = tempfile::Builder::new().prefix(prefix).permissions(permissions).tempdir_in(&parent);
        let directory = directory.expect("make a directory").keep();
        let shell = watch(&directory);
        Guard { directory, process: Mutex::new(None), shell }
    }

    /// The directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Starts the process, with its output in a file; the former one must have ended.
    pub(crate) fn start(&self, command: &mut Command) {
        let log = fs::File::options().append(true).create(true).open(self.directory.join("log"));
        let log = log.expect("open the log");
        let errors = log.try_clone().expect("open the log twice");
        let child = command.process_group(0).stdin(Stdio::null()).stdout(log).stderr(errors).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        fs::write(self.pid_file(), child.id().to_string()).expect("remember the process");
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
    }

    /// Whether the process runs.
    pub(crate) fn runs(&self) -> bool {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        process.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|status| status.is_none()))
    }

    /// What the process wrote.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    /// Ends the process without a warning.
    pub(crate) fn kill(&self) {
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut child) = process {
            let _ = child.kill();
            let _ = child.wait();
            let _ = fs::remove_file(self.pid_file());
        }
    }

    fn pid_file(&self) -> PathBuf {
        self.directory.join("pid")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.kill();
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// A shell that waits for the end of its input, which is the end of this process, and cleans up. In a group of its own,
/// so that an interrupt at the terminal does not end it first. Directories of a Nix store are read-only.
fn watch(directory: &Path) -> Child {
    let script = r#"
        cat >/dev/null
        cd /
        test ! -e "$1/pid" || kill -KILL "$(cat "$1/pid")"
        chmod -R u+w "$1"
        rm -rf "$1"
    "#;
    Command::new("/bin/sh")
        .args(["-c", script, "guard"])
        .arg(directory)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start the guard")
}

/// Serves on a thread of its own until the sender is dropped: a test may block the thread that it runs on while it waits
/// for a client.
pub(crate) fn serve<F>(
    run: impl FnOnce(tokio::net::TcpListener) -> F + Send + 'static,
) -> (SocketAddr, oneshot::Sender<()>)
where
    F: Future<Output = ()>,
{
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("a listener for tokio");
    let address = listener.local_addr().expect("an address");
    let (stop, stopped) = oneshot::channel::<()>();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            tokio::select! {
                () = run(listener) => {}
                _ = stopped => {}
            }
        });
    });
    (address, stop)
}
