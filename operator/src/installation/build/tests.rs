#![allow(clippy::unwrap_used)]

use k8s_openapi::api::core::v1::{Container, EnvVar, PodSpec};

use super::*;
use crate::installation::config::tests::installation;
use crate::names::SECRETS_HASH;

fn objects(installation: &Installation, role: Role) -> Objects {
    let owner = OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "Deployment".to_owned(),
        name: "harmonia-ci-operator".to_owned(),
        uid: "uid".to_owned(),
        ..OwnerReference::default()
    };
    build(&Wanted {
        installation,
        namespace: "ci",
        owner: &owner,
        role,
        database: role.database(installation).0,
        secrets_hash: "0123".to_owned(),
    })
}

fn pod(role: Role) -> PodSpec {
    objects(&installation(), role).deployment.spec.unwrap().template.spec.unwrap()
}

fn setting(container: &Container, name: &str) -> Option<String> {
    let found =
        container.env.iter().flatten().find(|variable| variable.name == format!("HARMONIA_CI_{name}"));
    found.and_then(|EnvVar { value, .. }| value.clone())
}

fn secrets_of(pod: &PodSpec) -> Vec<String> {
    let volumes = pod.volumes.iter().flatten();
    volumes.filter_map(|volume| volume.secret.as_ref()?.secret_name.clone()).collect()
}

#[test]
fn only_signers_have_the_keys_and_nobody_else_can_read_them() {
    for role in Role::ALL {
        let has = secrets_of(&pod(role)).contains(&"harmonia-ci-signing".to_owned());
        assert_eq!(has, role == Role::Signer, "{role:?}");
    }
    let pod = pod(Role::Signer);
    let volume = pod.volumes.iter().flatten().find(|volume| volume.name == "signing").unwrap();
    assert_eq!(volume.secret.as_ref().unwrap().default_mode, Some(0o400));
    assert_eq!(setting(&pod.containers[0], "SIGNING_KEY_FILES").unwrap(), "/run/harmonia-ci/signing");
}

#[test]
fn signers_are_told_how_long_what_is_kept() {
    let signer = pod(Role::Signer).containers[0].clone();
    let told = ["SWEEP_EVERY", "SWEEP_GRACE", "LOG_RETENTION"].map(|name| setting(&signer, name));
    assert_eq!(told, [Some("12h".to_owned()), Some("2d".to_owned()), None]);
}

#[test]
fn only_signers_and_frontends_have_the_bucket() {
    for role in Role::ALL {
        let pod = pod(role);
        let has = role != Role::Evaluator;
        assert_eq!(secrets_of(&pod).contains(&"harmonia-ci-s3".to_owned()), has, "{role:?}");
        assert_eq!(setting(&pod.containers[0], "S3_BUCKET").is_some(), has, "{role:?}");
    }
}

#[test]
fn only_frontends_have_the_secrets_of_forges() {
    for role in Role::ALL {
        let secrets = secrets_of(&pod(role));
        for secret in ["app", "code-bot"] {
            assert_eq!(secrets.contains(&secret.to_owned()), role == Role::Frontend, "{role:?} {secret}");
        }
    }
    let pod = pod(Role::Frontend);
    let forges: serde_json::Value =
        serde_json::from_str(&setting(&pod.containers[0], "FORGES").unwrap()).unwrap();
    let place = "/run/harmonia-ci/forges";
    assert_eq!(
        forges,
        serde_json::json!([
            {"name": "github", "type": "github", "app_id": 1234567, "private_key_file": format!("{place}/github/private-key"),
             "webhook_secret_file": format!("{place}/github/webhook-secret"), "client_id": "farm",
             "client_secret_file": format!("{place}/github/client-secret")},
            {"name": "code", "type": "gitea", "url": "https://code.example.org", "token_file": format!("{place}/code/token"),
             "webhook_secret_file": format!("{place}/code/webhook-secret")},
        ])
    );
    assert_eq!(setting(&pod.containers[0], "PUBLIC_URL").as_deref(), Some("https://ci.example.org"));
}

#[test]
fn people_sign_in_where_the_installation_says() {
    for role in Role::ALL {
        assert_eq!(
            secrets_of(&pod(role)).contains(&"sign-in".to_owned()),
            role == Role::Frontend,
            "{role:?}"
        );
    }
    let pod = pod(Role::Frontend);
    for (name, value) in [
        ("OIDC_ISSUER", Some("https://id.example.org")),
        ("OIDC_CLIENT_ID", Some("farm")),
        ("OIDC_CLIENT_SECRET_FILE", Some("/run/harmonia-ci/oidc/client-secret")),
        ("ADMINS", Some("ada@example.org,bob@example.org")),
        ("OPERATORS", None),
    ] {
        assert_eq!(setting(&pod.containers[0], name).as_deref(), value, "{name}");
    }
}

#[test]
fn every_role_has_its_own_login() {
    for role in Role::ALL {
        let expected = format!("harmonia-ci-database-{}", role.name());
        let secrets = secrets_of(&pod(role));
        let databases = secrets.iter().filter(|name| name.contains("-database-")).collect::<Vec<_>>();
        assert_eq!(databases, [&expected]);
        assert_eq!(
            setting(&pod(role).containers[0], "DATABASE_URL_FILE").unwrap(),
            "/run/harmonia-ci/database/url"
        );
    }
    assert_eq!(Role::Signer.login(&installation()), "harmonia_ci_signer");
}

#[test]
fn a_login_that_is_given_is_used() {
    let mut installation = installation();
    installation.database.signer = Some(SecretKey { secret: "mine".to_owned(), key: "dsn".to_owned() });
    let pod = objects(&installation, Role::Signer).deployment.spec.unwrap().template.spec.unwrap();
    assert!(secrets_of(&pod).contains(&"mine".to_owned()));
    assert_eq!(setting(&pod.containers[0], "DATABASE_URL_FILE").unwrap(), "/run/harmonia-ci/database/dsn");
}

#[test]
fn no_program_of_ours_has_a_right_that_it_does_not_need() {
    for role in Role::ALL {
        let pod = pod(role);
        assert_eq!(
            (pod.automount_service_account_token, pod.enable_service_links),
            (Some(false), Some(false))
        );
        let security = pod.containers[0].security_context.as_ref().unwrap();
        assert_eq!(security.run_as_non_root, Some(true));
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.capabilities.as_ref().unwrap().drop.as_deref(), Some(&["ALL".to_owned()][..]));
        assert_eq!(security.seccomp_profile.as_ref().unwrap().type_, "RuntimeDefault");
        let init = pod.init_containers.iter().flatten();
        assert!(
            init.into_iter().all(|container| container
                .security_context
                .as_ref()
                .unwrap()
                .privileged
                .is_none())
        );
    }
}

#[test]
fn a_signer_is_reached_at_its_own_address_and_a_frontend_at_the_farms() {
    let signer = pod(Role::Signer).containers[0].clone();
    assert_eq!(setting(&signer, "URL").unwrap(), "http://$(POD_IP):7778");
    let names: Vec<&str> = signer.env.iter().flatten().map(|variable| variable.name.as_str()).collect();
    let at = |name| names.iter().position(|known| *known == name).unwrap();
    assert!(at("POD_IP") < at("HARMONIA_CI_URL"));
    assert_eq!(
        setting(&pod(Role::Frontend).containers[0], "URL").unwrap(),
        "http://harmonia-ci-frontend.ci.svc"
    );
}

#[test]
fn an_evaluator_has_a_store_and_the_limits_that_were_asked_for() {
    let pod = pod(Role::Evaluator);
    let init: Vec<&str> =
        pod.init_containers.iter().flatten().map(|container| container.name.as_str()).collect();
    assert_eq!(init, ["seed", "nix-daemon"]);
    let evaluator = &pod.containers[0];
    assert_eq!(evaluator.image.as_deref(), Some("localhost/harmonia-ci-builder:test"));
    for container in pod.init_containers.iter().flatten() {
        assert_eq!(container.resources.as_ref().unwrap().limits.as_ref().unwrap()["memory"].0, "1Gi");
    }
    assert_eq!(setting(evaluator, "EVAL_MEMORY").unwrap(), (4_u64 << 30).to_string());
    assert_eq!(setting(evaluator, "EVAL_TIMEOUT").unwrap(), "1800s");
    assert_eq!(setting(evaluator, "EVAL_NETWORKS").unwrap(), "10.1.2.0/24,fd00::/8");
    assert_eq!(setting(evaluator, "SUBSTITUTERS").unwrap(), "https://cache.example.org");
    assert_eq!(setting(evaluator, "TRUSTED_PUBLIC_KEYS").unwrap(), "cache.example.org-1:AAAA");
    let token = |container: &Container| {
        container.volume_mounts.iter().flatten().any(|mount| mount.name == crate::pod::NETRC)
    };
    assert!(token(&pod.init_containers.as_ref().unwrap()[1]) && !token(evaluator));
}

#[test]
fn an_evaluators_daemon_builds_nothing() {
    let conf =
        objects(&installation(), Role::Evaluator).config_map.unwrap().data.unwrap()["nix.conf"].clone();
    for line in [
        "max-jobs = 0",
        "allow-import-from-derivation = false",
        "substituters = http://harmonia-ci-frontend.ci.svc/cache https://cache.example.org",
        "trusted-public-keys = cache.example.org-1:AAAA",
    ] {
        assert!(conf.lines().any(|found| found == line), "{line}: {conf}");
    }
}

#[test]
fn a_new_pod_is_there_before_an_old_one_goes() {
    let spec = objects(&installation(), Role::Frontend).deployment.spec.unwrap();
    let rolling = spec.strategy.unwrap().rolling_update.unwrap();
    assert_eq!(rolling.max_unavailable, Some(IntOrString::Int(0)));
    assert_eq!(spec.template.metadata.unwrap().annotations.unwrap()[SECRETS_HASH], "0123");
}

#[test]
fn a_single_pod_has_no_budget() {
    let mut installation = installation();
    assert!(objects(&installation, Role::Signer).disruption_budget.is_some());
    assert!(objects(&installation, Role::Evaluator).disruption_budget.is_none());
    installation.signer.replicas = 1;
    assert!(objects(&installation, Role::Signer).disruption_budget.is_none());
}

#[test]
fn where_pods_run_is_as_the_chart_says() {
    let pod = pod(Role::Signer);
    assert_eq!(pod.node_selector.unwrap()["disk"], "fast");
    assert_eq!(pod.tolerations.unwrap()[0].key.as_deref(), Some("ci"));
    assert_eq!(pod.image_pull_secrets.unwrap()[0].name, "registry");
    assert_eq!(pod.service_account_name.as_deref(), Some("harmonia-ci-signer"));
    assert_eq!(pod.containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap()["cpu"].0, "100m");
}

#[test]
fn everything_goes_with_the_operators_deployment() {
    for role in Role::ALL {
        let Objects { deployment, disruption_budget, config_map } = objects(&installation(), role);
        let metas = [
            Some(deployment.metadata),
            disruption_budget.map(|o| o.metadata),
            config_map.map(|o| o.metadata),
        ];
        for meta in metas.into_iter().flatten() {
            assert_eq!(meta.owner_references.unwrap()[0].name, "harmonia-ci-operator");
            assert_eq!(meta.labels.unwrap()[INSTANCE], "harmonia-ci");
        }
    }
}
