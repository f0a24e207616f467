//! What is built, whole, as YAML in `operator/tests/pool/`. Written anew by `HARMONIA_CI_BLESS=1 cargo test`.

use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::*;
use crate::pool::validate::tests::wanted;

fn documents(spec: Value) -> String {
    fn yaml<K: Serialize>(object: &K) -> String {
        let value = serde_json::to_value(object).unwrap();
        format!("---\n{}", serde_saphyr::to_string(&value).unwrap())
    }
    let objects = build(&wanted(spec));
    let Objects {
        service_account,
        config_map,
        network_policy,
        disruption_budget,
        workload,
        state: PhantomData,
    } = objects;
    let workload = match workload {
        Workload::Deployment(workload) => yaml(&workload),
        Workload::StatefulSet(workload) => yaml(&workload),
    };
    let budget = disruption_budget.map(|budget| yaml(&budget)).unwrap_or_default();
    [yaml(&service_account), yaml(&config_map), yaml(&network_policy), budget, workload].concat()
}

fn matches(name: &str, spec: Value) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pool").join(format!("{name}.yaml"));
    let built = documents(spec);
    if std::env::var_os("HARMONIA_CI_BLESS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &built).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(built == expected, "{} differs from what is built:\n{built}", file.display());
}

fn template(spec: Value) -> Value {
    match build(&wanted(spec)).workload {
        Workload::Deployment(workload) => serde_json::to_value(workload).unwrap(),
        Workload::StatefulSet(workload) => serde_json::to_value(workload).unwrap(),
    }
    .pointer("/spec/template")
    .unwrap()
    .clone()
}

#[test]
fn a_pool_that_says_nothing_has_ephemeral_volumes_and_a_user_namespace() {
    matches("ephemeral", json!({}));
}

#[test]
fn a_pool_on_the_nodes_disks_without_a_sandbox() {
    let store = json!({"mode": "EmptyDir", "size": "10Gi"});
    matches("empty-dir", json!({"store": store, "nix": {"sandbox": "Disabled"}, "replicas": 0}));
}

#[test]
fn a_pool_with_stores_that_stay_and_privileged_daemons() {
    let store = json!({"mode": "Persistent", "size": "50Gi", "storageClassName": "fast"});
    let spec = json!({
        "systems": ["aarch64-linux"], "store": store, "replicas": 4, "slots": 3, "cores": 8,
        "nix": {"sandbox": "Privileged", "settings": {"keep-going": "true"}},
        "drain": {"gracePeriod": "10m", "margin": "30s"},
    });
    matches("persistent", spec);
}

#[test]
fn an_overlay_is_laid_over_ours() {
    let template = template(json!({"template": {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "builds", "operator": "Exists"}],
            "priorityClassName": "low", "runtimeClassName": "kata", "imagePullSecrets": [{"name": "mine"}],
            "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "containers": [
                {"name": "nix-daemon", "resources": {"requests": {"cpu": "4"}}, "env": [{"name": "http_proxy", "value": "p"}],
                 "volumeMounts": [{"name": "extra", "mountPath": "/extra"}]},
                {"name": "builder", "resources": {"limits": {"memory": "1Gi"}}},
            ],
        },
    }}));
    let is = |path: &str, value: Value| assert_eq!(template.pointer(path), Some(&value), "{path}");
    is("/metadata/labels/team", json!("a"));
    is("/metadata/labels/ci.harmonia.dev~1pool", json!("big"));
    is("/metadata/annotations/note", json!("b"));
    is(
        "/spec/nodeSelector",
        json!({"disk": "fast", "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}),
    );
    is("/spec/tolerations", json!([{"key": "builds", "operator": "Exists"}]));
    is("/spec/priorityClassName", json!("low"));
    is("/spec/runtimeClassName", json!("kata"));
    is("/spec/imagePullSecrets", json!([{"name": "pull"}, {"name": "mine"}]));
    is("/spec/topologySpreadConstraints/0/topologyKey", json!("rack"));
    is("/spec/initContainers/1/resources/requests/cpu", json!("4"));
    is("/spec/initContainers/1/env", json!([{"name": "http_proxy", "value": "p"}]));
    is("/spec/initContainers/1/volumeMounts/4/mountPath", json!("/extra"));
    is("/spec/containers/0/resources/limits/memory", json!("1Gi"));
    assert_eq!(template.pointer("/spec/topologySpreadConstraints").unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn the_memory_of_a_pool_is_what_its_builds_have() {
    let daemon = json!({"name": "nix-daemon", "resources": {"requests": {"cpu": "4", "memory": "1Gi"}}});
    let overlay = json!({"spec": {"containers": [daemon]}});
    let template = template(json!({"memory": "16Gi", "template": overlay}));
    // The first one too: where a quota counts what containers ask for, none may be without.
    for container in ["/spec/initContainers/0/resources", "/spec/initContainers/1/resources"] {
        let expected = json!({"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}});
        assert_eq!(template.pointer(container), Some(&expected), "{container}");
    }
}

#[test]
fn builds_reach_neither_metadata_nor_what_is_forbidden_and_builders_reach_the_collector() {
    let mut wanted = wanted(json!({}));
    wanted.forbidden = vec!["10.0.0.1/32".to_owned(), "fd00::1/128".to_owned()];
    wanted.tracing = Some("http://10.1.2.3:4318".to_owned());
    let objects = build(&wanted);
    let policy = serde_json::to_value(&objects.network_policy).unwrap();
    let egress = policy["spec"]["egress"].as_array().unwrap();
    let internet = &egress.last().unwrap()["to"];
    assert_eq!(internet[0]["ipBlock"]["except"], json!(["169.254.169.254/32", "10.0.0.1/32"]));
    assert_eq!(internet[1]["ipBlock"]["except"], json!(["fd00:ec2::254/128", "fd00::1/128"]));
    assert!(egress.iter().any(|rule| {
        rule["to"][0]["ipBlock"]["cidr"] == "10.1.2.3/32" && rule["ports"][0]["port"] == 4318
    }));
    let Workload::Deployment(workload) = objects.workload else { panic!("a Deployment was expected") };
    let workload = serde_json::to_value(workload).unwrap();
    let env = workload.pointer("/spec/template/spec/containers/0/env").unwrap().as_array().unwrap();
    assert!(env.contains(&json!({"name": "HARMONIA_CI_OTLP_ENDPOINT", "value": "http://10.1.2.3:4318"})));
}

#[test]
fn the_builder_has_no_token_of_the_cache_and_the_daemon_no_login() {
    let template = template(json!({}));
    let mounts = |path: &str| -> Vec<String> {
        let mounts = template.pointer(path).unwrap().as_array().unwrap();
        mounts.iter().map(|mount| mount["name"].as_str().unwrap().to_owned()).collect()
    };
    let (builder, daemon) =
        (mounts("/spec/containers/0/volumeMounts"), mounts("/spec/initContainers/1/volumeMounts"));
    assert!(builder.contains(&"database-url".to_owned()) && !builder.contains(&"netrc".to_owned()));
    assert!(daemon.contains(&"netrc".to_owned()) && !daemon.contains(&"database-url".to_owned()));
}

#[test]
fn every_volume_has_a_name_that_no_overlay_may_take() {
    for mode in ["Ephemeral", "EmptyDir", "Persistent"] {
        let template = template(json!({"store": {"mode": mode}}));
        for volume in template.pointer("/spec/volumes").unwrap().as_array().unwrap() {
            let name = volume["name"].as_str().unwrap();
            assert!(harmonia_crds::overlay::VOLUMES.contains(&name), "{name}");
        }
    }
}

#[test]
fn other_contents_of_nix_conf_need_other_pods() {
    let hash = |spec| template(spec).pointer("/metadata/annotations/ci.harmonia.dev~1config-hash").cloned();
    assert_ne!(hash(json!({})), hash(json!({"nix": {"settings": {"keep-going": "true"}}})));
}

#[test]
fn a_single_builder_has_no_budget() {
    for (replicas, budget) in [(0, false), (1, false), (2, true)] {
        let objects = build(&wanted(json!({"replicas": replicas})));
        assert_eq!(objects.disruption_budget.is_some(), budget, "{replicas}");
    }
}
