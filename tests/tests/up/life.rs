//! From the first start to the second.

use std::fs;
use std::process::Command;

use harmonia_tests::eventually;

use crate::machine::{Machine, demo, errors, mode, repository};

#[tokio::test]
async fn a_fresh_machine_has_a_farm_that_answers() {
    let machine = Machine::new();
    let _up = machine.up().await;
    assert_eq!(machine.get("/readyz").await.unwrap().0, 200);
    let (status, info) = machine.get("/cache/nix-cache-info").await.unwrap();
    assert_eq!(status, 200, "the cache is open to this machine");
    assert!(info.contains("StoreDir: /nix/store"), "{info}");
}

#[tokio::test]
async fn what_it_prints_is_what_clients_need() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let (printed, url) = (machine.printed(), format!("http://{}", machine.listen));
    let (_, keys) = machine.get("/api/public-keys").await.unwrap();
    let keys: serde_json::Value = serde_json::from_str(&keys).unwrap();
    let word = |name: &str| keys[0][name].as_str().unwrap();
    let key = format!("{}:{}", word("name"), word("key"));
    for words in
        [url.as_str(), &format!("substituters = {url}/cache"), &format!("trusted-public-keys = {key}")]
    {
        assert!(printed.contains(words), "{words} is not in {printed}");
    }
}

#[tokio::test]
async fn other_verbs_find_it_by_a_file_that_holds_no_secret() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let local = fs::read_to_string(machine.local_file()).unwrap();
    let token = machine.data().join("token");
    assert_eq!(local, format!("url = \"http://{}\"\ntoken_file = \"{}\"\n", machine.listen, token.display()));
    assert_eq!(mode(&token), 0o600);
    assert!(!machine.printed().contains(fs::read_to_string(token).unwrap().trim()));
}

#[tokio::test]
async fn no_secret_is_on_a_command_line_or_in_an_environment() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let secrets = fs::read_dir(machine.data().join("secrets")).unwrap().flatten();
    let secrets: Vec<String> =
        secrets.map(|file| fs::read_to_string(file.path()).unwrap().trim().to_owned()).collect();
    for (pid, line) in machine.processes() {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let seen = format!("{}{}", line.join(" "), String::from_utf8_lossy(&environment));
        assert!(!secrets.iter().any(|secret| seen.contains(secret)), "{line:?}");
    }
}

#[tokio::test]
async fn a_build_is_told_no_variable_of_the_person() {
    let machine = Machine::new();
    let _up = machine.start(machine.command("up").env("TOKEN_OF_THE_PERSON", "secret")).await;
    // Its output is as empty as the variable has to be.
    let repository = repository(
        r#"{ asks = derivation (make "asks" "echo -n $TOKEN_OF_THE_PERSON >$out" // {
             impureEnvVars = [ "TOKEN_OF_THE_PERSON" ]; outputHashMode = "flat"; outputHashAlgo = "sha256";
             outputHash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"; }); }"#,
    );
    machine.does(&["eval", repository.path().to_str().unwrap(), "--wait"]);
}

#[tokio::test]
async fn a_proxy_is_not_asked_the_way_to_this_machine() {
    let machine = Machine::new();
    let nowhere = [("http_proxy", "http://127.0.0.1:1"), ("HTTP_PROXY", "http://127.0.0.1:1")];
    let _up = machine.start(machine.command("up").envs(nowhere)).await;
    let eval = ["--attr", "slow", "--wait"];
    let output = machine.run(machine.bare("eval").arg(demo()).args(eval).envs(nowhere));
    assert!(output.status.success(), "{}", errors(&output));
}

#[tokio::test]
async fn a_careful_person_keeps_nobody_from_passing_through() {
    let machine = Machine::new();
    let up = machine.command("up");
    let mut careful = Command::new("sh");
    careful.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(up.get_program()).args(up.get_args());
    careful.envs(up.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let _up = machine.start(&mut careful).await;
    machine.does(&["eval", demo().to_str().unwrap(), "--attr", "slow", "--wait"]);
}

#[tokio::test]
async fn who_has_no_home_has_a_farm_all_the_same() {
    let machine = Machine::new();
    let _up = machine.start(machine.command("up").env("XDG_CONFIG_HOME", "/proc/nowhere")).await;
    assert!(machine.printed().contains("warning: other commands do not find this farm"));
}

#[tokio::test]
async fn what_a_person_has_set_for_a_role_counts() {
    let machine = Machine::new();
    fs::create_dir(machine.data()).unwrap();
    fs::write(machine.data().join("config.toml"), "anonymous_read = false\n").unwrap();
    let _up = machine.up().await;
    assert_eq!(machine.get("/cache/nix-cache-info").await.unwrap().0, 401);
}

#[tokio::test]
async fn the_bucket_stays_where_it_is() {
    let machine = Machine::new();
    let up = machine.up().await;
    let place = machine.part("s3").unwrap().1;
    up.kill();
    eventually("nothing is left", || async { machine.processes().is_empty() }).await;
    let _up = machine.up().await;
    assert_eq!(machine.part("s3").unwrap().1, place);
}

#[tokio::test]
async fn an_interrupt_ends_everything_and_a_new_start_goes_on_with_the_same_keys() {
    let machine = Machine::new();
    let up = machine.up().await;
    let token = fs::read_to_string(machine.data().join("token")).unwrap();
    let keys = machine.get("/api/public-keys").await.unwrap();
    up.interrupt();
    assert_eq!(up.ended().await.code(), Some(0), "{}", machine.printed());
    eventually("nothing is left", || async { machine.processes().is_empty() }).await;

    let _up = machine.up().await;
    assert_eq!(fs::read_to_string(machine.data().join("token")).unwrap(), token);
    assert_eq!(machine.get("/api/public-keys").await.unwrap(), keys);
}

#[tokio::test]
async fn an_idle_farm_says_nothing_but_that_it_is_ready() {
    let machine = Machine::new();
    let _up = machine.up().await;
    let printed = machine.printed();
    assert!(printed.trim_start().starts_with("harmonia-ci is ready"), "{printed}");
    assert!(machine.data().join("log/signer.log").exists());
}
