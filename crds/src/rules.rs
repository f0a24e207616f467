//! The rules of the CRDs, evaluated as the API server does, with the sentences that people read. What the schema alone
//! refuses (types, patterns, unknown fields) needs the API server itself: tests/tests/apiserver.

use kube::core::cel::Validator;
use serde_json::{Value, json};

use crate::{BuilderPool, Project, all};

/// What is wrong with an object, or with changing it to this from an earlier one.
fn complaints(object: &Value, earlier: Option<&Value>) -> Vec<String> {
    let crds = all();
    let crd = crds.iter().find(|crd| crd.spec.names.kind == object["kind"]).expect("a kind of ours");
    let schema = crd.spec.versions[0].schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref());
    let schema = serde_json::to_value(schema).unwrap();
    match Validator::new().validate(&schema, object, earlier) {
        Ok(()) => Vec::new(),
        Err(errors) => {
            errors.into_iter().map(|error| format!("{}: {}", error.field_path, error.message)).collect()
        }
    }
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "ci.harmonia.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

/// A pool that is fine but for these fields.
fn pool(fields: Value) -> Value {
    let mut spec = json!({ "systems": ["x86_64-linux"] });
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    object("BuilderPool", "x86", spec)
}

fn project(source: Value) -> Value {
    object("Project", "dotfiles", json!({ "source": source }))
}

#[track_caller]
fn accepts(object: &Value) {
    assert_eq!(complaints(object, None), Vec::<String>::new(), "{object:#}");
    // What the API server takes, the operator can read.
    match object["kind"].as_str() {
        Some("Project") => drop(serde_json::from_value::<Project>(object.clone()).unwrap()),
        _ => drop(serde_json::from_value::<BuilderPool>(object.clone()).unwrap()),
    }
}

#[track_caller]
fn refuses(object: &Value, sentence: &str) {
    let complaints = complaints(object, None);
    assert!(complaints.len() == 1 && complaints[0] == sentence, "{complaints:#?}\nfor {object:#}");
}

#[test]
fn a_pool_needs_nothing_but_a_system() {
    accepts(&pool(json!({})));
    refuses(&pool(json!({ "systems": [] })), "spec.systems: name at least one system, such as x86_64-linux");
}

#[test]
fn the_example_of_the_interface_is_accepted() {
    accepts(&pool(json!({
        "features": ["big-parallel", "kvm"], "mandatoryFeatures": [], "slots": 2, "cores": 4,
        "scaling": { "min": 0, "max": 10, "stabilizationWindow": "5m" },
        "store": { "mode": "Ephemeral", "size": "100Gi", "storageClassName": "fast" },
        "drain": { "gracePeriod": "2h", "margin": "60s" },
        "limits": { "timeout": "4h", "maxSilent": "30m", "maxOutputSize": "4Gi", "maxLogSize": "64Mi" },
        "nix": { "substituters": [], "trustedPublicKeys": [], "sandbox": "Privileged", "settings": { "keep-failed": "true" } },
        "template": { "metadata": { "labels": { "team": "ci" } }, "spec": {
            "nodeSelector": { "disk": "nvme" }, "priorityClassName": "builds", "runtimeClassName": "kata",
            "volumes": [{ "name": "scratch", "emptyDir": {} }],
            "containers": [{
                "name": "nix-daemon", "resources": { "requests": { "cpu": "4", "memory": "8Gi" } },
                "env": [{ "name": "TMPDIR", "value": "/scratch" }], "volumeMounts": [{ "name": "scratch", "mountPath": "/scratch" }]
            }]
        } },
        "paused": false
    })));
    accepts(&project(
        json!({ "github": { "owner": "acme", "repo": "dotfiles" }, "secretRef": { "name": "key" } }),
    ));
}

#[test]
fn times_and_sizes_are_within_bounds() {
    let grace = "write a time from 10s to 168h, such as 90s, 30m, 2h or 1h30m";
    for time in ["2 hours", "2", "", "9s", "169h", "2d", "-2h", "2h "] {
        refuses(
            &pool(json!({ "drain": { "gracePeriod": time, "margin": "1s" } })),
            &format!("spec.drain.gracePeriod: {grace}"),
        );
    }
    let store = "write a size from 1Mi to 1024Ti, such as 64Mi or 100Gi";
    for size in ["4GB", "big", "", "100m", "1Ki", "1025Ti", "-1Gi", "1e3"] {
        refuses(&pool(json!({ "store": { "size": size } })), &format!("spec.store.size: {store}"));
    }
    let memory = "write a size from 64Mi to 64Ti, such as 64Mi or 100Gi";
    for size in ["much", "63Mi", "65Ti"] {
        refuses(&pool(json!({ "memory": size })), &format!("spec.memory: {memory}"));
    }
    accepts(&pool(json!({ "memory": "16Gi" })));
    for (time, size) in [("1h30m", "1.5Gi"), ("10s", "4G"), ("168h", "1048576")] {
        accepts(&pool(
            json!({ "drain": { "gracePeriod": time, "margin": "1s" }, "store": { "size": size } }),
        ));
    }
    let retention =
        json!({ "retention": "3 months", "source": { "git": { "url": "https://example.org/x.git" } } });
    refuses(
        &object("Project", "x", retention),
        "spec.retention: write a number of days from 1d to 9999d, such as 90d",
    );
}

#[test]
fn the_margin_is_shorter_than_the_grace_period() {
    let sentence = "spec.drain: margin must be shorter than gracePeriod";
    refuses(&pool(json!({ "drain": { "gracePeriod": "30s" } })), sentence);
    refuses(&pool(json!({ "drain": { "gracePeriod": "1m", "margin": "60s" } })), sentence);
    accepts(&pool(json!({ "drain": { "gracePeriod": "61s" } })));
}

#[test]
fn one_writer_chooses_the_number_of_builders() {
    refuses(
        &pool(json!({ "replicas": 3, "scaling": { "max": 10 } })),
        "spec.replicas: replicas cannot be set while scaling.max is: the operator chooses the number between scaling.min and scaling.max",
    );
    refuses(
        &pool(json!({ "scaling": {} })),
        "spec.scaling.max: scaling needs max, the most builders that there may be",
    );
    refuses(
        &pool(json!({ "scaling": { "min": 2, "max": 1 } })),
        "spec.scaling: min must not be more than max",
    );
    refuses(
        &pool(json!({ "scaling": { "mode": "External", "max": 1 } })),
        "spec.scaling: min and max are for mode Auto: with External, whoever writes the scale subresource has bounds of its own",
    );
    accepts(&pool(json!({ "replicas": 3 })));
    accepts(&pool(json!({ "replicas": 3, "scaling": { "mode": "External" } })));
    accepts(&pool(json!({ "scaling": { "min": 1, "max": 1 } })));
}

#[test]
fn a_storage_class_needs_a_volume() {
    refuses(
        &pool(json!({ "store": { "mode": "EmptyDir", "storageClassName": "fast" } })),
        "spec.store.storageClassName: storageClassName is for the modes Ephemeral and Persistent: an emptyDir has none",
    );
}

#[test]
fn what_cannot_change_does_not() {
    let complaint = |earlier: Value, now: Value| complaints(&pool(now), Some(&pool(earlier)));
    assert_eq!(
        complaint(json!({}), json!({ "systems": ["aarch64-linux"] })),
        ["spec.systems: systems cannot be changed: make another pool and delete this one"]
    );
    let both = json!({ "systems": ["x86_64-linux", "i686-linux"] });
    let swapped = json!({ "systems": ["i686-linux", "x86_64-linux"] });
    assert_eq!(complaint(both.clone(), swapped), Vec::<String>::new(), "a set has no order");
    assert_eq!(complaint(both, json!({})).len(), 1);
    assert_eq!(
        complaint(json!({}), json!({ "store": { "mode": "EmptyDir" } })),
        ["spec.store.mode: store.mode cannot be changed: make another pool and delete this one"]
    );
    let store = |mode: &str, size: &str| json!({ "store": { "mode": mode, "size": size } });
    assert_eq!(
        complaint(store("Persistent", "1Gi"), store("Persistent", "2Gi")),
        [
            "spec.store: size and storageClassName of a Persistent store cannot be changed: make another pool and delete this one"
        ]
    );
    assert_eq!(complaint(store("Ephemeral", "1Gi"), store("Ephemeral", "2Gi")), Vec::<String>::new());
    assert_eq!(complaint(json!({}), json!({ "slots": 4, "replicas": 2 })), Vec::<String>::new());
}

#[test]
fn an_overlay_leaves_alone_what_is_the_operators() {
    let spec = |spec: Value| pool(json!({ "template": { "spec": spec } }));
    let builder = |fields: Value| {
        let mut container = json!({ "name": "builder" });
        container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        spec(json!({ "containers": [container] }))
    };
    refuses(
        &spec(json!({ "containers": [{ "name": "miner" }] })),
        "spec.template.spec.containers: the containers are builder and nix-daemon: no other can be added",
    );
    refuses(
        &builder(json!({ "env": [{ "name": "HARMONIA_CI_SLOTS", "value": "9" }] })),
        "spec.template.spec.containers[0].env: variables that start with HARMONIA_CI_ are the operator's: set the field of the pool instead",
    );
    for path in ["/nix", "/nix/store", "/", "/etc", "/run/harmonia-ci/x", "/tmp"] {
        refuses(
            &builder(json!({ "volumeMounts": [{ "name": "x", "mountPath": path }] })),
            "spec.template.spec.containers[0].volumeMounts: the pod has mounts of its own at /nix, /etc/nix, /run/harmonia-ci, /var/lib/harmonia-ci, /tmp: mount elsewhere",
        );
    }
    for path in ["/nixos", "/tmp/scratch"] {
        accepts(&builder(json!({ "volumeMounts": [{ "name": "x", "mountPath": path }] })));
    }
    refuses(
        &spec(json!({ "volumes": [{ "name": "nix", "emptyDir": {} }] })),
        "spec.template.spec.volumes: the pod has volumes of its own named nix, nix-conf, database-url, netrc, state, tmp: choose another name",
    );
    refuses(
        &spec(json!({ "nodeSelector": { "kubernetes.io/arch": "arm64" } })),
        "spec.template.spec.nodeSelector: kubernetes.io/arch follows from systems and cannot be set here",
    );
    refuses(
        &pool(json!({ "template": { "metadata": { "labels": { "app.kubernetes.io/name": "x" } } } })),
        "spec.template.metadata.labels: keys that start with ci.harmonia.dev/ or app.kubernetes.io/ are the operator's",
    );
}

#[test]
fn nix_settings_cannot_undo_the_sandbox_or_the_trust() {
    for name in ["sandbox", "extra-trusted-users", "require-sigs", "substituters", "build-use-sandbox"] {
        refuses(
            &pool(json!({ "nix": { "settings": { name: "x", "keep-failed": "true" } } })),
            &format!(
                "spec.nix.settings: the Nix setting {name} is refused: it follows from other fields of the pool, or would undo the sandbox or the trust in signatures"
            ),
        );
    }
    refuses(
        &pool(json!({ "nix": { "settings": { "keep-failed = true\nsandbox": "false" } } })),
        "spec.nix.settings: names of Nix settings have small letters, digits and dashes only",
    );
}

#[test]
fn a_project_has_one_source() {
    let sentence = "spec.source: give exactly one of github, gitea and git";
    let (github, git) =
        (json!({ "owner": "acme", "repo": "x" }), json!({ "url": "https://example.org/x.git" }));
    refuses(&project(json!({})), sentence);
    refuses(&project(json!({ "github": github, "git": git })), sentence);
    accepts(&project(json!({ "git": git })));
    accepts(&project(
        json!({ "gitea": { "instance": "https://git.example.org", "owner": "acme", "repo": "x" } }),
    ));
}

#[test]
fn names_leave_room_for_what_is_made_of_them() {
    let sentence =
        ": the name must have at most 40 characters and no dot: pods and labels are named after it";
    for kind in ["BuilderPool", "Project"] {
        let spec = match kind {
            "Project" => json!({ "source": { "git": { "url": "https://example.org/x.git" } } }),
            _ => json!({ "systems": ["x86_64-linux"] }),
        };
        accepts(&object(kind, &"x".repeat(40), spec.clone()));
        refuses(&object(kind, &"x".repeat(41), spec.clone()), sentence);
        refuses(&object(kind, "x.86", spec), sentence);
    }
}
