//! From the first start to the second.

use std::fs;

use harmonia_tests::eventually;

use crate::machine::{Machine, mode};

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
