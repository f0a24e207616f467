//! A person's machine with `harmonia-ci` on it, of which everything ends with the test.

use std::collections::BTreeMap;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use harmonia_tests::eventually;
use harmonia_tests::press::free_port;
use tempfile::TempDir;

/// In the environment of every process of one machine.
const MARK: &str = "HARMONIA_TEST_MACHINE";

/// A data directory, and where its farm listens.
pub struct Machine {
    directory: TempDir,
    pub listen: SocketAddr,
}

/// A running `up`.
pub struct Up<'a> {
    machine: &'a Machine,
    child: Child,
}

impl Machine {
    pub fn new() -> Machine {
        // PostgreSQL's account may not enter root's home, and a new Nix builds in no directory that everybody writes to.
        let root = is_root();
        let parent =
            if root { PathBuf::from("/var/lib") } else { std::env::home_dir().unwrap().join(".cache") };
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix("harmonia-up-").permissions(permissions).tempdir_in(parent).unwrap();
        Machine { directory, listen: SocketAddr::from(([127, 0, 0, 1], free_port())) }
    }

    pub fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// Where other verbs find the farm.
    pub fn local_file(&self) -> PathBuf {
        self.directory.path().join("config/harmonia-ci/local.toml")
    }

    /// The program with a verb, on this machine's data and address.
    pub fn command(&self, verb: &str) -> Command {
        let mut command = self.bare(verb);
        command.arg("--data").arg(self.data()).arg("--listen").arg(self.listen.to_string());
        command
    }

    /// The program with a verb, as this machine's person starts it.
    pub fn bare(&self, verb: &str) -> Command {
        // The test is in target/debug/deps, the program above it.
        let own = std::env::current_exe().unwrap();
        let program = own.parent().unwrap().parent().unwrap().join("harmonia-ci");
        assert!(program.exists(), "{} is missing: `./dev test up` builds it", program.display());
        let mut command = Command::new(program);
        command
            .arg(verb)
            .env("XDG_CONFIG_HOME", self.directory.path().join("config"))
            .env(MARK, self.directory.path());
        command
    }

    /// Runs a verb to its end.
    pub fn run(&self, command: &mut Command) -> Output {
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a verb as a person does; what it printed, and its exit code.
    pub fn verb(&self, words: &[&str]) -> (String, i32) {
        let output = self.run(self.bare(words[0]).args(&words[1..]));
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), errors(&output));
        (text, output.status.code().expect("it ends by itself"))
    }

    /// A verb that must succeed; what it printed.
    pub fn does(&self, words: &[&str]) -> String {
        let (text, code) = self.verb(words);
        assert_eq!(code, 0, "{words:?}: {text}");
        text
    }

    /// A verb by a signer's configuration.
    pub fn as_signer(&self, words: &[&str]) -> String {
        let signer = self.data().join("secrets/signer.toml");
        let output = self.run(self.bare(words[0]).args(&words[1..]).env("HARMONIA_CI_CONFIG", signer));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {text}{}", errors(&output));
        text
    }

    /// Starts a farm and waits until it says that it is ready.
    pub async fn up(&self) -> Up<'_> {
        self.up_with(&[]).await
    }

    /// The same with further options.
    pub async fn up_with(&self, options: &[&str]) -> Up<'_> {
        self.start(self.command("up").args(options)).await
    }

    /// The same by a command that starts it; it says that it is ready, or up for maintenance.
    pub async fn start(&self, command: &mut Command) -> Up<'_> {
        let log = fs::File::options().append(true).create(true).open(self.output()).unwrap();
        let errors = log.try_clone().unwrap();
        fs::write(self.output(), "").unwrap();
        // It ends with this test, however that ends: as its own roles end with it.
        command.env("HARMONIA_CI_SUPERVISED", "1").stdin(Stdio::piped()).stdout(log).stderr(errors);
        let child = command.process_group(0).spawn().unwrap();
        let mut up = Up { machine: self, child };
        up.says("\nharmonia-ci is ").await;
        up
    }

    /// What `up` has printed.
    pub fn printed(&self) -> String {
        fs::read_to_string(self.output()).unwrap_or_default()
    }

    fn output(&self) -> PathBuf {
        self.directory.path().join("output")
    }

    /// What the frontend answers.
    pub async fn get(&self, path: &str) -> Option<(u16, String)> {
        get(self.listen, path).await
    }

    /// All processes that this machine's `up` started and that still run, by process id: their words.
    pub fn processes(&self) -> BTreeMap<u32, Vec<String>> {
        let mark = format!("{MARK}={}", self.directory.path().display());
        let data = self.data().display().to_string();
        let processes = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let words = |file: &str| -> Vec<String> {
                let bytes = fs::read(entry.path().join(file)).unwrap_or_default();
                bytes
                    .split(|byte| *byte == 0)
                    .map(|word| String::from_utf8_lossy(word).into_owned())
                    .collect()
            };
            let (line, environment) = (words("cmdline"), words("environ"));
            // Those that are not ours have but little in their environment, and PostgreSQL writes over that; a process that has
            // ended has neither.
            let ours = environment.contains(&mark)
                || environment.iter().chain(&line).any(|word| word.contains(&data));
            (ours && line.len() > 1).then_some((pid, line))
        });
        processes.collect()
    }

    /// The process of a part, and where it listens if it does.
    pub fn part(&self, name: &str) -> Option<(u32, Option<SocketAddr>)> {
        let is = |line: &[String]| match name {
            "postgres" => line[0].ends_with("/postgres") && line[1] == "-D",
            "nix" => line[0].ends_with("nix-daemon"),
            role => line[0].ends_with("/harmonia-ci") && line[1] == role,
        };
        // The daemon's children have its name too; it is the oldest.
        let pid = self.processes().into_iter().find(|(_, line)| is(line))?.0;
        let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
        let listen = environment.split('\0').find_map(|pair| pair.strip_prefix("HARMONIA_CI_LISTEN="));
        Some((pid, listen.map(|address| address.parse().unwrap())))
    }
}

impl Up<'_> {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has printed something.
    pub async fn says(&mut self, text: &str) {
        let machine = self.machine;
        let child = std::sync::Mutex::new(&mut self.child);
        eventually(text, || async {
            let ended = child.lock().unwrap().try_wait().unwrap();
            let printed = machine.printed();
            assert!(ended.is_none(), "it ended with {ended:?}:\n{printed}");
            printed.contains(text)
        })
        .await;
    }

    /// As Ctrl-C at its terminal does.
    pub fn interrupt(&self) {
        signal(self.pid(), "INT");
    }

    /// Waits for its end.
    pub async fn ended(mut self) -> ExitStatus {
        let child = std::sync::Mutex::new(&mut self.child);
        eventually("up ends", || async { child.lock().unwrap().try_wait().unwrap().is_some() }).await;
        self.child.wait().unwrap()
    }

    /// Ends it without a warning.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Up<'_> {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Drop for Machine {
    /// Its directory can be removed only when nobody writes to it any more.
    fn drop(&mut self) {
        for _ in 0..500 {
            if self.processes().is_empty() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// What is answered at an address.
pub async fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let http = harmonia_builder::upload::http_client().unwrap();
    let answer = http.get(format!("http://{address}{path}")).send().await.ok()?;
    Some((answer.status().as_u16(), answer.text().await.ok()?))
}

/// A port that is taken for as long as the listener lives.
pub fn take(address: SocketAddr) -> TcpListener {
    TcpListener::bind(address).unwrap()
}

pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status().unwrap();
    assert!(status.success(), "process {pid} takes no signal");
}

/// The repository that comes with the documents.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/demo").canonicalize().unwrap()
}

/// One with this `default.nix`, in which `make` turns a name and a script into what `derivation` wants.
pub fn repository(expression: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::copy(demo().join("sandbox-shell.nix"), directory.path().join("sandbox-shell.nix")).unwrap();
    let text = format!(
        r#"let
  shell = import ./sandbox-shell.nix;
  make = name: script: {{
    inherit name; inherit (shell) builder; system = builtins.currentSystem; args = shell.args ++ [ "-euc" script ];
  }};
in {expression}
"#
    );
    fs::write(directory.path().join("default.nix"), text).unwrap();
    directory
}

/// What a program said to people.
pub fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The mode of a file, without its type.
pub fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).unwrap().mode() & 0o777
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").unwrap().uid() == 0
}
