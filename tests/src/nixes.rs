//! Private Nix daemons, an old and a new one, each with an empty store of its own; and derivations that build in it.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::guard::{Guard, cache};

/// Which Nix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The machine's own, from Debian: 2.8 on Debian 12, protocol 1.34.
    Old,
    /// The next Debian's: 2.34, protocol 1.38.
    New,
}

impl Version {
    /// Both, for tests that run on each.
    pub const ALL: [Version; 2] = [Version::Old, Version::New];

    /// How to start one of Nix's programs, such as `nix-build`.
    fn program(self, name: &str) -> Vec<PathBuf> {
        match self {
            Version::Old => {
                vec![which(name).unwrap_or_else(|| {
                    panic!("{name} is not installed: run `./dev test nix`, which does it")
                })]
            }
            // One program that looks at its name, started by the loader that belongs to its libraries.
            Version::New => {
                let parts = newest_forky();
                let library = parts.join("lib");
                let option = |text: &str| PathBuf::from(text);
                vec![
                    parts.join("loader"),
                    option("--library-path"),
                    library,
                    option("--argv0"),
                    option(name),
                    parts.join("nix"),
                ]
            }
        }
    }
}

/// A store of its own with a running daemon; both vanish with it, or with the process that started it.
pub struct Nix {
    version: Version,
    guard: Guard,
}

impl Nix {
    /// Starts a daemon on an empty store: sandbox on, no substituters.
    pub fn start(version: Version) -> Nix {
        Nix::start_with(version, "")
    }

    /// The same with further lines of `nix.conf`; the last of a name wins.
    pub fn start_with(version: Version, settings: &str) -> Nix {
        let nix = Nix { version, guard: Guard::new("nix-") };
        let root = nix.root();
        for directory in ["conf", "home", "tmp", "expressions/bb"] {
            fs::create_dir_all(root.join(directory)).expect("make a directory");
        }
        // A newer Nix would start itself as its build hook, without the loader.
        let hook = if version == Version::New { "build-hook =\n" } else { "" };
        fs::write(root.join("conf/nix.conf"), format!("{SETTINGS}{hook}{settings}\n"))
            .expect("write nix.conf");
        let busybox = which("busybox").expect("busybox is missing: run `./dev test nix`, which installs it");
        fs::copy(busybox, root.join("expressions/bb/busybox")).expect("copy busybox");
        nix.make_store();
        nix.start_daemon();
        nix
    }

    /// Two daemons that are the first to open a store stand in each other's way.
    fn make_store(&self) {
        let mut command = self.plain_command(&self.version.program("nix-store"));
        command.env("NIX_REMOTE", format!("local?root={}", self.root().display())).arg("--init");
        assert!(command.status().expect("start nix-store").success(), "an empty store cannot be made");
    }

    /// Which Nix it is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.root().join("socket")
    }

    /// The directory that stands for `/` in the store's paths.
    pub fn root(&self) -> &Path {
        self.guard.directory()
    }

    /// Where a store path's files are.
    pub fn real(&self, store_path: &str) -> PathBuf {
        self.root().join(store_path.trim_start_matches('/'))
    }

    /// The store's SQLite database.
    pub fn database(&self) -> PathBuf {
        self.root().join("nix/var/nix/db/db.sqlite")
    }

    /// What the daemon has logged so far.
    pub fn log(&self) -> String {
        self.guard.log()
    }

    /// One of Nix's programs as a client of this daemon, with nothing of the user's in its environment.
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.plain_command(&self.version.program(program));
        // The client reads files of the store itself, hence the root.
        command
            .env("NIX_REMOTE", format!("unix://{}?root={}", self.socket().display(), self.root().display()));
        command
    }

    /// A directory with Nix's programs under their own names, for who starts them without [`Nix::command`].
    pub fn bin(&self) -> PathBuf {
        let bin = self.root().join("bin");
        fs::create_dir_all(&bin).expect("make a directory");
        for name in ["nix", "nix-instantiate"] {
            let words: Vec<String> =
                self.version.program(name).iter().map(|word| word.display().to_string()).collect();
            let (script, program) = (format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" ")), bin.join(name));
            fs::write(&program, script).expect("write a script");
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("make it executable");
        }
        bin
    }

    /// Runs a program to its success and returns what it wrote to its standard output, trimmed.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output().expect("start the program");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {}\n{errors}", output.status);
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    /// Writes an expression and returns its file, for `nix-build` and the like.
    pub fn write(&self, expression: &Expression) -> PathBuf {
        self.write_text(&expression.text())
    }

    /// The same of a text in which `bb` and `tools` are known.
    pub fn write_text(&self, text: &str) -> PathBuf {
        let text = format!("{PRELUDE}{text}\n");
        let name = format!("{:x}.nix", Sha256::digest(&text));
        let path = self.root().join("expressions").join(name);
        fs::write(&path, text).expect("write the expression");
        path
    }

    /// The path of the expression's derivation, which is then in the store with all its inputs' derivations.
    pub fn instantiate(&self, expression: &Expression) -> String {
        let file = self.write(expression);
        self.run("nix-instantiate", &[file.to_str().expect("UTF-8")])
    }

    /// The paths of the derivations of a text's attributes, with the attributes' names.
    pub fn instantiate_all(&self, text: &str) -> BTreeMap<String, String> {
        let file = self.write_text(text);
        let names =
            format!("builtins.concatStringsSep \" \" (builtins.attrNames (import {}))", file.display());
        let names = self.run("nix-instantiate", &["--eval", "--expr", &names]);
        let names: Vec<String> = names.trim_matches('"').split(' ').map(str::to_owned).collect();
        let attributes = names.iter().flat_map(|name| ["--attr", name]);
        let file = file.to_str().expect("UTF-8");
        let drvs = self.run("nix-instantiate", &attributes.chain([file]).collect::<Vec<_>>());
        let drvs = drvs.lines().map(|line| line.split('!').next().unwrap_or(line).to_owned());
        names.into_iter().zip(drvs).collect()
    }

    /// Builds an expression; the paths of its outputs, in the expression's order.
    pub fn build_all(&self, expression: &Expression) -> Vec<String> {
        let derivation = self.instantiate(expression);
        self.run("nix-store", &["--realise", &derivation]);
        let path = |output: &String| self.run("nix-store", &["--query", "--binding", output, &derivation]);
        expression.outputs.iter().map(path).collect()
    }

    /// Builds an expression; the path of its first output.
    pub fn build(&self, expression: &Expression) -> String {
        self.build_all(expression).remove(0)
    }

    /// Ends the daemon, its connections and its builds at once, as a node's power failure would.
    pub fn kill_daemon(&self) {
        self.guard.kill();
    }

    /// Starts the daemon again after [`Nix::kill_daemon`], on the same store.
    pub fn start_daemon(&self) {
        let _ = fs::remove_file(self.socket());
        // The daemon's children leave its session: in a process namespace they end with it, whatever they do.
        let mut words: Vec<PathBuf> = UNSHARE.iter().map(PathBuf::from).collect();
        words.extend(self.version.program("nix-daemon"));
        let mut command = self.plain_command(&words);
        self.guard.start(command.env("NIX_REMOTE", format!("local?root={}", self.root().display())));
        crate::until("the Nix daemon listens", || {
            assert!(self.guard.runs(), "the Nix daemon ended:\n{}", self.log());
            UnixStream::connect(self.socket()).is_ok()
        });
    }

    fn plain_command(&self, words: &[PathBuf]) -> Command {
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .current_dir(self.root())
            .env_clear()
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .env("LC_ALL", "C")
            .env("HOME", self.root().join("home"))
            .env("TMPDIR", self.root().join("tmp"))
            .env("XDG_CACHE_HOME", self.root().join("home/.cache"))
            .env("NIX_CONF_DIR", self.root().join("conf"))
            .env("NIX_DAEMON_SOCKET_PATH", self.socket())
            .env("NIX_PATH", "");
        command
    }
}

const UNSHARE: [&str; 7] =
    ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"];

/// Without `sandbox-fallback = false` a new Nix builds unsandboxed where it cannot make a sandbox. The shell that
/// Debian's Nix puts into the sandbox is another one in each version.
const SETTINGS: &str = "\
build-users-group =
experimental-features = nix-command flakes
fsync-metadata = false
max-jobs = 4
sandbox = true
sandbox-fallback = false
sandbox-paths =
substituters =
";

/// A derivation without nixpkgs, in Nix's language: busybox is all it needs.
#[derive(Debug, Clone)]
pub struct Expression {
    attributes: String,
    outputs: Vec<String>,
}

impl Expression {
    /// A derivation whose builder is a shell script with busybox's tools; it makes `$out`.
    pub fn new(name: &str, script: &str) -> Expression {
        let attributes = format!(
            "system = builtins.currentSystem; builder = \"${{bb}}/busybox\"; \
             PATH = \"${{tools}}/bin\"; name = {}; args = [ \"sh\" \"-euc\" {} ];",
            quoted(name),
            quoted(script)
        );
        Expression { attributes, outputs: vec!["out".to_owned()] }
    }

    /// A file with the derivation's name in it.
    pub fn trivial(name: &str) -> Expression {
        Expression::new(name, "echo \"$name\" >$out")
    }

    /// `out` is a directory with a file, `dev` one with a link to it.
    pub fn two_outputs(name: &str) -> Expression {
        Expression::new(name, "mkdir $out $dev; echo \"$name\" >$out/file; ln -s $out/file $dev/link")
            .outputs(&["out", "dev"])
    }

    /// Writes a line to its log and fails.
    pub fn failing(name: &str) -> Expression {
        Expression::new(name, "echo this build fails >&2; exit 7")
    }

    /// A file whose content is known beforehand.
    pub fn fixed_output(name: &str, content: &str) -> Expression {
        Expression::new(name, "printf %s \"$content\" >$out")
            .attribute("content", &quoted(content))
            .attribute("outputHashMode", "\"flat\"")
            .attribute("outputHashAlgo", "\"sha256\"")
            .attribute("outputHash", &format!("\"{:x}\"", Sha256::digest(content)))
    }

    /// Two outputs, `dev` with a link to `out`, that differ whenever they are built.
    pub fn unreproducible(name: &str) -> Expression {
        let script = "mkdir $out $dev; head -c 32 /dev/urandom | od >$out/file; date >>$out/file; \
                      cp $out/file $dev/file; ln -s $out/file $dev/link";
        Expression::new(name, script).outputs(&["out", "dev"])
    }

    /// A directory with `count` small files, ten a directory.
    pub fn files(name: &str, count: usize) -> Expression {
        let script = "mkdir $out; i=0; while [ $i -lt $count ]; do \
                      d=$out/$((i / 10)); [ -d $d ] || mkdir $d; echo $i >$d/$i; i=$((i + 1)); done";
        Expression::new(name, script).attribute("count", &count.to_string())
    }

    /// The same with paths that follow from contents.
    pub fn floating(self) -> Expression {
        self.attribute("__contentAddressed", "true")
            .attribute("outputHashMode", "\"recursive\"")
            .attribute("outputHashAlgo", "\"sha256\"")
    }

    /// The same with these outputs, the first of which is the default one.
    pub fn outputs(mut self, names: &[&str]) -> Expression {
        self.outputs = names.iter().map(|&name| name.to_owned()).collect();
        self
    }

    /// The same with one more attribute: a variable of the script; the value is in Nix's language.
    pub fn attribute(mut self, name: &str, value: &str) -> Expression {
        let _ = write!(self.attributes, " {name} = {value};");
        self
    }

    /// The same with the default output of another derivation as a variable of the script.
    pub fn input(self, name: &str, other: &Expression) -> Expression {
        let text = format!("({})", other.text());
        self.attribute(name, &text)
    }

    fn text(&self) -> String {
        let outputs: Vec<String> = self.outputs.iter().map(|name| quoted(name)).collect();
        format!("derivation {{ {} outputs = [ {} ]; }}", self.attributes, outputs.join(" "))
    }
}

/// The file is called `busybox`, in a directory: the builder's own name says which of its programs it is.
const PRELUDE: &str = r#"let
  bb = builtins.path { path = ./bb; name = "bb"; };
  tools = derivation {
    name = "tools";
    system = builtins.currentSystem;
    builder = "${bb}/busybox";
    args = [ "sh" "-euc" ''
      ${bb}/busybox mkdir -p $out/bin
      ${bb}/busybox --install -s $out/bin
    '' ];
  };
in
"#;

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace("${", "\\${"))
}

fn newest_forky() -> PathBuf {
    let versions = fs::read_dir(cache()).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let version = name.strip_prefix("nix-forky-")?.split('.').map(str::parse::<u32>);
        Some((version.collect::<Result<Vec<_>, _>>().ok()?, entry.path()))
    });
    let newest = versions.max().map(|(_, path)| path);
    newest.unwrap_or_else(|| {
        panic!("{} has no nix-forky-…: run `./dev test nix`, which makes it", cache().display())
    })
}

fn which(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.exists())
}
