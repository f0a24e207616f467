//! nix-eval-jobs instead of plain Nix. No package that this machine could install has it, and it is built only with the libraries of one
//! version of Nix, so another program takes its place here that answers as its documentation says: a line of JSON for each attribute.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use harmonia_service::settings::Settings;
use harmonia_tests::nixes::Version;

use crate::scene::{ENDLESS, Scene, unchanged};

/// Asks Nix for one attribute after the other.
const DOUBLE: &str = r#"#!/usr/bin/perl
use strict; use FindBin; use JSON::PP;
my ($expression, @options);
while (@ARGV) {
  my $word = shift @ARGV;
  if ($word eq '--expr') { $expression = shift @ARGV }
  elsif ($word eq '--option') { push @options, $word, shift @ARGV, shift @ARGV }
  elsif ($word eq '--extra-experimental-features') { push @options, $word, shift @ARGV }
  elsif ($word eq '--workers' || $word eq '--max-memory-size') { shift @ARGV }
}
$| = 1;
my $json = JSON::PP->new->allow_nonref;
sub say_of { my ($path, %more) = @_; print $json->encode({ attr => join('.', @$path), attrPath => $path, %more }), "\n" }
sub look {
  my @path = @_;
  my $at = join '', map { ".\"$_\"" } @path;
  my $enters = @path ? 'v.recurseForDerivations or false' : 'true';
  my $text = "let v = ($expression)$at; in if !builtins.isAttrs v then null "
    . "else if v.type or null == \"derivation\" then { inherit (v) drvPath; } "
    . "else if $enters then { names = builtins.attrNames v; } else null";
  my $errors = "$ENV{TMPDIR}/errors";
  my $pid = open(my $output, '-|') // die;
  if (!$pid) {
    open STDERR, '>', $errors or die;
    exec "$FindBin::Bin/nix-instantiate", qw(--eval --strict --json --read-write-mode --show-trace), @options, '-E', $text;
  }
  my $answer = do { local $/; <$output> };
  if (!close $output) {
    open my $file, '<', $errors or die;
    return say_of(\@path, error => do { local $/; <$file> });
  }
  my $found = $json->decode($answer) // return;
  say_of(\@path, drvPath => $found->{drvPath}) if $found->{drvPath};
  look(@path, $_) for @{ $found->{names} // [] };
}
look();
"#;

/// With such a program beside Nix's.
fn install(settings: Settings, program: &str) -> Settings {
    let file = Path::new(settings.get("nix_bin").unwrap()).join("nix-eval-jobs");
    fs::write(&file, program).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    settings
}

fn with_jobs(settings: Settings) -> Settings {
    install(settings, DOUBLE)
}

type Seen = (BTreeMap<String, Option<String>>, Vec<String>);

async fn seen(more: fn(Settings) -> Settings, file: &str, text: &str, attrs: &[&str]) -> Seen {
    let scene = Scene::with(Version::Old, more).await;
    scene.write(file, text);
    let evaluation = scene.evaluate(scene.path(), attrs).await;
    assert_eq!(evaluation.error, None);
    let attributes = scene.press.attributes(evaluation.id).await;
    // Of an error, what it says first: frames are another's.
    let first = |error: String| error.lines().next().unwrap_or_default().to_owned();
    (attributes.into_iter().map(|(name, error)| (name, error.map(first))).collect(), scene.jobs().await)
}

/// The same source, by either.
async fn same(file: &str, text: &str, attrs: &[&str]) -> Seen {
    let plain = seen(unchanged, file, text, attrs).await;
    assert_eq!(seen(with_jobs, file, text, attrs).await, plain);
    plain
}

#[tokio::test]
async fn it_finds_what_plain_nix_finds_with_the_same_words() {
    let text = "{ a = make \"a\"; inner = { recurseForDerivations = true; b = make \"b\"; t = throw \"no\"; }; \
                hidden = { c = make \"c\"; }; number = 7; wrong = { }.missing; }";
    let (attributes, jobs) = same("default.nix", text, &[]).await;
    assert_eq!(attributes.keys().collect::<Vec<_>>(), ["a", "inner.b", "inner.t", "wrong"]);
    assert_eq!(jobs.len(), 2);
    let (attributes, _) = same("default.nix", text, &["hidden", "number", "inner.bb"]).await;
    assert_eq!(attributes.keys().collect::<Vec<_>>(), ["hidden.c", "inner.bb", "number"]);
}

#[tokio::test]
async fn it_finds_the_checks_of_a_flake() {
    let flake = r#"{ outputs = _: let make = name: derivation { inherit name; system = "x86_64-linux"; builder = "/bin/sh"; };
      in { checks.x86_64-linux.unit = make "unit"; checks.aarch64-linux.other = make "other"; }; }"#;
    let (attributes, _) = same("flake.nix", flake, &[]).await;
    assert_eq!(
        attributes.keys().collect::<Vec<_>>(),
        ["checks.aarch64-linux.other", "checks.x86_64-linux.unit"]
    );
}

#[tokio::test]
async fn its_limits_end_in_the_same_sentences() {
    let scene = Scene::with(Version::Old, |settings| with_jobs(settings).with("eval_timeout", "3s")).await;
    scene.write("default.nix", &format!("{{ endless = builtins.seq {ENDLESS} (make \"b\"); }}"));
    let error = scene.refused(scene.path()).await;
    assert!(error.contains("was stopped") && error.contains("HARMONIA_CI_EVAL_TIMEOUT"), "{error}");
    assert!(scene.workplaces().is_empty());
    let scene = Scene::with(Version::Old, with_jobs).await;
    let many = "builtins.listToAttrs (builtins.genList (i: { name = \"a${toString i}\"; value = throw \"x\"; }) 100000)";
    scene.write("default.nix", many);
    let error = scene.refused(scene.path()).await;
    assert!(error.contains("100000") && error.contains("HARMONIA_CI_EVAL_MAX_ATTRS"), "{error}");
    scene.write("default.nix", "{ a = ");
    let error = scene.refused(scene.path()).await;
    assert!(error.contains("cannot be evaluated") && error.contains("syntax error"), "{error}");
}

#[tokio::test]
async fn what_it_says_is_not_believed() {
    let foreign =
        "#!/bin/sh\necho '{\"attr\":\"a\",\"attrPath\":[\"a\"],\"drvPath\":\"/etc/passwd\"}'\necho babble\n";
    let scene = Scene::with(Version::Old, |settings| install(settings, foreign)).await;
    scene.write("default.nix", "{ a = make \"a\"; }");
    let error = scene.refused(scene.path()).await;
    assert!(error.contains("says something that is not understood: babble"), "{error}");
    assert!(scene.jobs().await.is_empty());
}
