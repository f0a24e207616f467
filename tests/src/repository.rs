//! A repository of our own, made of a seed, whose derivations are of every kind that is built.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sha2::{Digest, Sha256};

/// What the Nix of evaluators, builders and clients has to know for it.
pub const FEATURES: &str = "experimental-features = nix-command flakes ca-derivations\n";

/// An expression and what is known of it.
#[derive(Debug, Clone)]
pub struct Repository {
    /// A set of derivations, in Nix's language; `bb` and `tools` are known in it.
    pub text: String,
    /// Those attributes of which only a build shows where their outputs are.
    pub realised: Vec<String>,
}

impl Repository {
    /// The same seed gives the same repository.
    pub fn generate(seed: u64) -> Repository {
        let mut dice = StdRng::seed_from_u64(seed);
        let parts = [
            plain(seed, &mut dice),
            chain(&mut dice),
            DIAMOND.to_owned(),
            OUTPUTS.to_owned(),
            fixed(seed),
            STRUCTURED.to_owned(),
            FLOATING.to_owned(),
            odd_names(&mut dice),
            odd_files(&mut dice),
        ];
        let realised = ["floating", "floating-above", "deferred", "deferred-above", "deferred-structured"];
        Repository {
            text: format!("{MAKE}rec {{\n{}\n}}", parts.concat()),
            realised: realised.map(str::to_owned).into(),
        }
    }
}

const MAKE: &str = r#"
let
  make = name: script: more: derivation ({
    inherit name;
    system = builtins.currentSystem;
    builder = "${bb}/busybox";
    PATH = "${tools}/bin";
    args = [ "sh" "-euc" script ];
  } // more);
  floats = { __contentAddressed = true; outputHashMode = "recursive"; outputHashAlgo = "sha256"; };
  # Without variables in the environment; ash cannot read .attrs.sh.
  from-json = name: script: more: make name ''
    export PATH=${tools}/bin
    of() { grep -o "\"$1\":\"[^\"]*\"" .attrs.json | tail -n 1 | cut -d '"' -f 4; }
    ${script}
  '' ({ __structuredAttrs = true; } // more);
in
"#;

fn plain(seed: u64, dice: &mut StdRng) -> String {
    let lines: u16 = dice.random_range(1..100);
    format!(
        "base = make \"base\" \"yes {seed} | head -n {lines} >$out\" {{ }};\n\
         self = make \"self\" \"mkdir $out; ln -s $out/x $out/y; echo $out $base >$out/x\" {{ inherit base; }};\n"
    )
}

/// Each with the one before in its closure.
fn chain(dice: &mut StdRng) -> String {
    let length = dice.random_range(4..7);
    let link = |n: u32| {
        let below = if n == 0 { "base".to_owned() } else { format!("chain-{}", n - 1) };
        format!("chain-{n} = make \"chain-{n}\" \"echo {n} $below >$out\" {{ below = {below}; }};\n")
    };
    (0..length).map(link).collect()
}

const DIAMOND: &str = r#"
left = make "left" "ln -s $base $out" { inherit base; };
right = make "right" "cp $base $out" { inherit base; };
top = make "top" "mkdir $out; ln -s $left $right $out" { inherit left right; };
"#;

const OUTPUTS: &str = r#"
multiple = make "multiple" "mkdir $out $dev; echo $lib >$out/x; echo text >$lib; ln -s $out/x $dev/x"
  { outputs = [ "out" "dev" "lib" ]; };
multiple-user = make "multiple-user" "cat $dev/x >$out" { inherit (multiple) dev; };
"#;

fn fixed(seed: u64) -> String {
    let contents = format!("contents {seed}");
    let flat = format!("{:x}", Sha256::digest(&contents));
    let recursive = format!("{:x}", Sha256::digest(nar_of_file(contents.as_bytes())));
    let declared = |mode: &str, hash: &str| {
        format!(
            "{{ outputHashMode = \"{mode}\"; outputHashAlgo = \"sha256\"; \
             outputHash = \"{hash}\"; inherit base; }}"
        )
    };
    let script = format!("\"printf %s '{contents}' >$out\"");
    format!(
        "flat = make \"flat\" {script} {};\n\
         recursive = make \"recursive\" {script} {};\n\
         fixed-above = make \"fixed-above\" {script} ({} // {{ inherit floating; }});\n\
         fixed-user = make \"fixed-user\" \"cat $flat $recursive >$out\" {{ inherit flat recursive; }};\n",
        declared("flat", &flat),
        declared("recursive", &recursive),
        declared("flat", &flat)
    )
}

fn nar_of_file(contents: &[u8]) -> Vec<u8> {
    let mut nar = Vec::new();
    for word in [&b"nix-archive-1"[..], b"(", b"type", b"regular", b"contents", contents, b")"] {
        nar.extend_from_slice(&(word.len() as u64).to_le_bytes());
        nar.extend_from_slice(word);
        nar.resize(nar.len().next_multiple_of(8), 0);
    }
    nar
}

const STRUCTURED: &str = r#"
structured = from-json "structured" ''
  mkdir $(of out); grep -o '"list":[^]]*]' .attrs.json >$(of out)/list; echo $(of out) >$(of dev)
'' { outputs = [ "out" "dev" ]; list = [ 1 2.5 null true { deep = "é\t\n\""; } ]; inherit base; };
"#;

const FLOATING: &str = r#"
floating = make "floating" "mkdir $dev; echo $base >$out; ln -s $out $dev/out"
  ({ outputs = [ "out" "dev" ]; inherit base; } // floats);
floating-above = make "floating-above" "cat $floating >$out; echo $floating >>$out"
  ({ inherit floating; } // floats);
deferred = make "deferred" "mkdir $out $dev; ln -s $floating $out/x; ln -s $out $dev/y"
  { outputs = [ "out" "dev" ]; floating = floating.dev; };
deferred-above = make "deferred-above" "echo $deferred $base >$out" { inherit deferred base; };
deferred-structured = from-json "deferred-structured" "cat $(of floating-above) >$(of out)"
  { inherit floating-above; };
"#;

fn odd_names(dice: &mut StdRng) -> String {
    let letters = ['+', '?', '=', '.', '_', '-'];
    let name: String = (0..8).map(|_| letters[dice.random_range(0..letters.len())]).collect();
    format!("odd-name = make \"a{name}b\" \"echo $base >$out\" {{ inherit base; }};\n")
}

fn odd_files(dice: &mut StdRng) -> String {
    let large: u32 = dice.random_range(3_000_000..9_000_000);
    let many: u16 = dice.random_range(10..60);
    format!(
        r#"
odd-files = make "odd-files" ''
  mkdir -p $out/empty/in/empty "$out/ two  words" $out/many
  printf x >"$out/$(printf '\377\300.bin')"; printf y >"$out/$(printf 'a\nb')"; printf z >"$out/é"
  ln -s /nowhere $out/dangling; ln -s .. $out/up; ln -s "$(printf '\376')" $out/strange
  : >$out/nothing; echo '#! /bin/sh' >$out/run; chmod +x $out/run; chmod 400 $out/nothing
  yes large | head -c {large} >$out/large
  i=0; while [ $i -lt {many} ]; do echo $i >$out/many/$i; i=$((i + 1)); done
'' {{ }};
"#
    )
}
