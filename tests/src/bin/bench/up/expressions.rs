//! What is evaluated.

use std::path::Path;

/// Derivations in the large expression, and the attributes that they are spread over.
const DERIVATIONS: usize = 5_000;
const ATTRIBUTES: usize = 50;

/// A directory whose derivations nobody has seen, and nobody can build: only its evaluation is measured. Each depends on two
/// others, which makes chains of some hundred.
pub fn large(directory: &Path, salt: &str) {
    let text = format!(
        "let\n  make = n: derivation {{\n    name = \"d${{toString n}}\"; system = \"no-machine\"; builder = \"/bin/sh\"; salt = \"{salt}\";\n    \
         inputs = if n < 20 then [ ] else [ (builtins.elemAt all (n - 20)) (builtins.elemAt all (n / 2)) ];\n  }};\n  \
         all = builtins.genList make {DERIVATIONS};\n  \
         top = n: {{ name = \"top${{toString n}}\"; value = builtins.elemAt all ({DERIVATIONS} - 1 - n); }};\n\
         in builtins.listToAttrs (builtins.genList top {ATTRIBUTES})\n"
    );
    std::fs::write(directory.join("default.nix"), text).expect("write the expression");
}

/// A directory with one derivation that takes no time.
pub fn small(directory: &Path, salt: &str) {
    with_shell(directory, "small", &format!("echo {salt} >$out"));
}

fn with_shell(directory: &Path, name: &str, script: &str) {
    std::fs::copy(demo().join("sandbox-shell.nix"), directory.join("sandbox-shell.nix"))
        .expect("the demo's shell");
    let text = format!(
        "let shell = import ./sandbox-shell.nix; in derivation {{\n  name = \"{name}\"; system = builtins.currentSystem; inherit (shell) builder;\n  \
         args = shell.args ++ [ \"-c\" ''{script}'' ];\n}}\n"
    );
    std::fs::write(directory.join("default.nix"), text).expect("write the expression");
}

/// A directory with one derivation that says, ten times a second, how long the machine has been up.
pub fn talking(directory: &Path, lines: usize) {
    with_shell(
        directory,
        "talking",
        &format!(
            "n=0; while [ $n -lt {lines} ]; do read up rest </proc/uptime; echo \"printed at $up\"; n=$((n + 1)); sleep 0.1; done; echo $up >$out"
        ),
    );
}

/// The repository that newcomers try.
pub fn demo() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/demo").canonicalize().expect("docs/demo")
}
