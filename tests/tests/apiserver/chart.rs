//! The chart, by the real Helm.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use harmonia_operator::installation::config::Installation;
use harmonia_tests::kube::{Namespace, try_kubectl};
use serde_json::{Value, json};
use tokio::process::Command;

/// The production values that must be there.
const PRODUCTION: [&str; 3] = [
    "--set=database.admin.existingSecret=db",
    "--set=signing.existingSecret=keys",
    "--set=s3.existingSecret=bucket",
];
const QUICKSTART: [&str; 1] = ["--set=quickstart.enabled=true"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn chart() -> String {
    root().join("charts/harmonia-ci").to_str().unwrap().to_owned()
}

/// What Helm printed, or its complaint.
async fn helm(words: &[&str]) -> Result<String, String> {
    run("helm", words).await
}

async fn run(program: &str, words: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(words).output().await;
    let output =
        output.unwrap_or_else(|error| panic!("{program}, which `./dev test` puts into PATH: {error}"));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// The manifests, as Helm writes them, with these options.
async fn render(options: &[&str]) -> Result<String, String> {
    helm(&[&["template", "harmonia-ci", &chart(), "--namespace=ci"], options].concat()).await
}

/// The objects with these options.
async fn objects(options: &[&str]) -> Vec<Value> {
    parse(&render(options).await.unwrap())
}

fn parse(manifests: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(manifests).expect("YAML from helm");
    documents.into_iter().filter(|document| !document.is_null()).collect()
}

/// The object of a kind and a name.
fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}

fn kinds(objects: &[Value]) -> BTreeSet<&str> {
    objects.iter().filter_map(|object| object["kind"].as_str()).collect()
}

/// What the operator is told, which it understands.
fn installation(objects: &[Value]) -> Value {
    let map = find(objects, "ConfigMap", "harmonia-ci-operator").unwrap();
    let text = map["data"]["installation.yaml"].as_str().unwrap();
    serde_saphyr::from_str::<Installation>(text).unwrap();
    serde_saphyr::from_str(text).unwrap()
}

#[tokio::test]
async fn lint_finds_nothing() {
    for options in [&PRODUCTION[..], &QUICKSTART[..]] {
        helm(&[&["lint", "--strict", &chart()], options].concat()).await.unwrap();
    }
}

#[tokio::test]
async fn the_chart_carries_the_version_of_the_program() {
    let about: Value = serde_saphyr::from_str(&helm(&["show", "chart", &chart()]).await.unwrap()).unwrap();
    assert_eq!(about["appVersion"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn the_chart_carries_the_definitions_as_they_are_generated() {
    let read = |directory: &str| {
        let mut files: Vec<_> = fs::read_dir(root().join(directory))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
            .map(|path| (path.file_name().unwrap().to_owned(), fs::read_to_string(path).unwrap()))
            .collect();
        files.sort();
        files
    };
    let generated = read("crds");
    assert!(!generated.is_empty());
    assert!(
        read("charts/harmonia-ci/files/crds") == generated,
        "run: rm charts/harmonia-ci/files/crds/*; cp crds/*.yaml charts/harmonia-ci/files/crds"
    );
}

#[tokio::test]
async fn a_packed_chart_is_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().to_str().unwrap();
    helm(&["package", &chart(), "--destination", target]).await.unwrap();
    let archive = fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    let options =
        [&["template", "harmonia-ci", archive.to_str().unwrap(), "--namespace=ci"], &PRODUCTION[..]];
    let packed = helm(&options.concat()).await.unwrap();
    assert_eq!(packed, render(&PRODUCTION).await.unwrap());
}

#[tokio::test]
async fn unknown_and_unfit_values_are_refused() {
    for (option, complaint) in [
        ("--set=quikstart.enabled=true", "Additional property quikstart is not allowed"),
        ("--set=operator.replica=2", "operator: Additional property replica is not allowed"),
        ("--set=quickstart.s3.sizes=1Gi", "quickstart.s3: Additional property sizes is not allowed"),
        ("--set=operator.replicas=3", "operator.replicas: Must be less than or equal to 2"),
        ("--set=evaluator.memory=lots", "evaluator.memory: Does not match pattern"),
        (
            "--set=evaluator.substituters={cache.nixos.org}",
            "evaluator.substituters.0: Does not match pattern",
        ),
        ("--set=evaluator.trustedPublicKeys={a:b}", "evaluator.trustedPublicKeys.0: Does not match pattern"),
        ("--set=evaluator.memory=4K", "evaluator.memory: Does not match pattern"),
        ("--set=evaluator.memory=1P", "evaluator.memory: Does not match pattern"),
        ("--set=evaluator.timeout=1d", "evaluator.timeout: Does not match pattern"),
        ("--set=evaluator.networks={10.1.2.3}", "evaluator.networks.0: Does not match pattern"),
        ("--set=signer.sweepGrace=soon", "signer.sweepGrace: Does not match pattern"),
        ("--set=tracing.endpoint=collector:4318", "tracing.endpoint: Does not match pattern"),
        ("--set=networkPolicy.forbidden={10.0.0.1}", "networkPolicy.forbidden.0: Does not match pattern"),
        ("--set=networkPolicy.forbidden={10.0.0.0/0}", "networkPolicy.forbidden.0: Does not match pattern"),
        ("--set=networkPolicy.forbidden={10.0.0.1/33}", "networkPolicy.forbidden.0: Does not match pattern"),
        ("--set=networkPolicy.forbidden={fd00::/129}", "networkPolicy.forbidden.0: Does not match pattern"),
        (
            "--set=quickstart.pool.spec.repliacs=2",
            "quickstart.pool.spec.repliacs: a BuilderPool has no such field",
        ),
        (
            "--set=quickstart.pool.spec.template.spec.containers[0].image=x",
            "quickstart.pool.spec.template.spec.containers[0].image: a BuilderPool has no such field",
        ),
        ("--set=s3.endpoint=minio:9000", "s3.endpoint: Does not match pattern"),
        ("--set=quickstart.persistence.enabled=maybe", "must be one of the following: \"auto\", true, false"),
    ] {
        let said = render(&[&QUICKSTART[..], &[option]].concat()).await.unwrap_err();
        assert!(said.contains(complaint), "{option}: {said}");
    }
}

#[tokio::test]
async fn what_the_operator_reads_is_accepted() {
    for option in [
        "--set=evaluator.timeout=1h30m,evaluator.memory=1.5Gi",
        "--set=networkPolicy.forbidden={10.0.0.1/32,fd00::/8,::1/128}",
        "--set=quickstart.pool.spec.nix.settings.keep-going=true,quickstart.pool.spec.memory=4Gi",
        "--set=quickstart.pool.spec.template.spec.volumes[0].name=a,quickstart.pool.spec.template.spec.volumes[0].hostPath.path=/a",
    ] {
        installation(&objects(&[&QUICKSTART[..], &[option]].concat()).await);
    }
}

#[tokio::test]
async fn what_is_missing_is_named() {
    for (options, complaint) in [
        (&[][..], "The database is missing: set database.admin.existingSecret"),
        (&["--set=database.operator.existingSecret=db"], "database.signer.existingSecret"),
        (&PRODUCTION[..1], "The signing key is missing: set signing.existingSecret"),
        (&[PRODUCTION[0], PRODUCTION[1], "--set=ingress.enabled=true"], "ingress.host is missing"),
    ] {
        let said = render(options).await.unwrap_err();
        assert!(said.contains(complaint), "{options:?}: {said}");
    }
}

#[tokio::test]
async fn the_operator_is_told_what_the_values_say() {
    let objects = objects(&[
        &PRODUCTION[..],
        &[
            "--set=image.tag=v1,builderImage.tag=v2,imagePullSecrets={pull},drainTaints={example.org/going}",
            "--set=database.signer.existingSecret=db,database.signer.key=signer",
            "--set=s3.endpoint=https://s3.example.org,s3.publicEndpoint=https://cdn.example.org,s3.region=eu-1",
            "--set=frontend.replicas=3,frontend.anonymousRead=true,signer.nodeSelector.role=trusted,signer.sweepGrace=3d",
            "--set=evaluator.networks={10.1.2.0/24}",
            "--set=networkPolicy.forbidden={10.0.0.1/32},tracing.endpoint=http://collector:4318",
        ],
    ]
    .concat())
    .await;
    let requests = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": memory}});
    let expected = json!({
        "name": "harmonia-ci",
        "image": "localhost/harmonia-ci:v1",
        "builderImage": "localhost/harmonia-ci-builder:v2",
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": ["pull"],
        "database": {"admin": {"secret": "db", "key": "url"}, "signer": {"secret": "db", "key": "signer"}},
        "s3": {
            "endpoint": "https://s3.example.org", "publicEndpoint": "https://cdn.example.org", "bucket": "harmonia-ci",
            "region": "eu-1", "virtualHost": false, "secret": "bucket",
        },
        "signing": {"secret": "keys"},
        "drainTaints": ["example.org/going"],
        "forbidden": ["10.0.0.1/32"],
        "tracing": {"endpoint": "http://collector:4318"},
        "frontend": {
            "replicas": 3, "resources": requests("50m", "64Mi"), "nodeSelector": {}, "tolerations": [],
            "url": "http://harmonia-ci-frontend.ci.svc", "anonymousRead": true,
        },
        "signer": {
            "replicas": 2, "resources": requests("50m", "64Mi"), "nodeSelector": {"role": "trusted"}, "tolerations": [],
            "sweepEvery": "1d", "sweepGrace": "3d", "logRetention": "30d",
        },
        "evaluator": {
            "replicas": 1, "resources": requests("500m", "1Gi"), "nodeSelector": {}, "tolerations": [],
            "daemonResources": requests("50m", "64Mi"), "workers": 1, "memory": "4Gi", "timeout": "30m",
            "networks": ["10.1.2.0/24"],
            "substituters": ["https://cache.nixos.org"],
            "trustedPublicKeys": ["cache.nixos.org-1:6NCHdD59X431o0gWypbMrAURkbJ16ZPMQFGspcDShjY="],
        },
        "adminToken": {"secret": "harmonia-ci-admin-token"},
    });
    assert_eq!(installation(&objects), expected);
    assert!(!kinds(&objects).contains("StatefulSet") && !kinds(&objects).contains("Secret"));
}

#[tokio::test]
async fn the_longest_release_leaves_room_for_the_revisions_of_its_stateful_sets() {
    let (release, chart) = ("r".repeat(53), chart());
    let options = [&["template", &release, &chart, "--namespace=ci"], &QUICKSTART[..]].concat();
    let objects = parse(&helm(&options).await.unwrap());
    let sets: Vec<&Value> = objects.iter().filter(|object| object["kind"] == "StatefulSet").collect();
    assert_eq!(sets.len(), 2);
    for set in sets {
        // The label controller-revision-hash of its pods.
        let revision = format!("{}-0123456789", set["metadata"]["name"].as_str().unwrap());
        assert!(revision.len() <= 63, "{revision}");
    }
}

#[tokio::test]
async fn every_container_says_what_it_needs() {
    for object in objects(&QUICKSTART).await {
        let spec =
            if object["kind"] == "Pod" { &object["spec"] } else { &object["spec"]["template"]["spec"] };
        for container in spec["containers"].as_array().into_iter().flatten() {
            let name = &object["metadata"]["name"];
            assert!(container["resources"]["requests"]["cpu"].is_string(), "{name} {}", container["name"]);
        }
    }
}

#[tokio::test]
async fn the_quickstart_brings_what_no_value_names() {
    let all = objects(&QUICKSTART).await;
    let told = installation(&all);
    assert_eq!(told["database"]["admin"]["secret"], "harmonia-ci-postgres");
    assert_eq!(told["s3"]["endpoint"], "http://harmonia-ci-s3.ci.svc:9000");
    assert_eq!(told["signing"]["secret"], "harmonia-ci-signing");
    assert_eq!(told["pool"]["spec"]["store"]["mode"], "EmptyDir");
    for name in ["harmonia-ci-postgres", "harmonia-ci-s3"] {
        assert!(find(&all, "StatefulSet", name).is_some() && find(&all, "Secret", name).is_some());
    }
    let own = objects(&[&QUICKSTART[..], &PRODUCTION[..]].concat()).await;
    assert!(!kinds(&own).contains("StatefulSet") && !kinds(&own).contains("Secret"));
    assert_eq!(installation(&own)["pool"], told["pool"]);
    let bare = objects(&[QUICKSTART[0], "--set=quickstart.pool.name="]).await;
    assert!(installation(&bare).get("pool").is_none());
}

#[tokio::test]
async fn volumes_are_claimed_if_asked_for() {
    let claims = |objects: &[Value]| {
        let set = find(objects, "StatefulSet", "harmonia-ci-postgres").unwrap();
        set["spec"]["volumeClaimTemplates"].clone()
    };
    // Without a cluster there is no default StorageClass either.
    assert_eq!(claims(&objects(&QUICKSTART).await), Value::Null);
    let kept = objects(&[QUICKSTART[0], "--set=quickstart.persistence.storageClassName=fast"]).await;
    assert_eq!(claims(&kept)[0]["spec"]["storageClassName"], "fast");
    let off = "--set=quickstart.persistence.storageClassName=fast,quickstart.persistence.enabled=false";
    assert_eq!(claims(&objects(&[QUICKSTART[0], off]).await), Value::Null);
}

#[tokio::test]
async fn rights_are_as_narrow_as_the_namespaces_watched() {
    let namespaces = |objects: &[Value]| -> BTreeSet<String> {
        let roles = objects.iter().filter(|object| {
            object["kind"] == "Role" && object["metadata"]["name"] == "ci-harmonia-ci-operator"
        });
        roles.map(|role| role["metadata"]["namespace"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(namespaces(&objects(&PRODUCTION).await), BTreeSet::new());
    let some = objects(&[&PRODUCTION[..], &["--set=watchNamespaces={a,ci}"]].concat()).await;
    assert_eq!(namespaces(&some), BTreeSet::from(["a".to_owned(), "ci".to_owned()]));
    let role = find(&some, "ClusterRole", "ci-harmonia-ci-operator").unwrap();
    assert_eq!(
        role["rules"],
        json!([{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}])
    );
    let none =
        objects(&[&PRODUCTION[..], &["--set=watchNamespaces={a}", "--set=watchNodes=false"]].concat()).await;
    assert!(!kinds(&none).contains("ClusterRole") && !kinds(&none).contains("ClusterRoleBinding"));
}

#[tokio::test]
async fn nothing_hooks_into_an_installation() {
    let objects = objects(&QUICKSTART).await;
    let hooks: BTreeSet<_> = objects
        .iter()
        .filter_map(|object| object["metadata"]["annotations"]["helm.sh/hook"].as_str())
        .collect();
    assert_eq!(hooks, BTreeSet::from(["pre-delete", "test"]));
}

#[tokio::test]
async fn definitions_are_kept_unless_told_otherwise() {
    let policy = |objects: &[Value]| {
        let definition = find(objects, "CustomResourceDefinition", "builderpools.ci.harmonia.dev")?;
        Some(definition["metadata"]["annotations"]["helm.sh/resource-policy"].clone())
    };
    assert_eq!(policy(&objects(&PRODUCTION).await), Some(json!("keep")));
    let with = async |option| objects(&[&PRODUCTION[..], &[option]].concat()).await;
    assert_eq!(policy(&with("--set=crds.keep=false").await), Some(Value::Null));
    assert_eq!(policy(&with("--set=crds.install=false").await), None);
}

const WATCHED: &str = "--set=metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true,\
                       metrics.prometheusRule.labels.release=prometheus,metrics.dashboard.enabled=true";

#[tokio::test]
async fn who_is_on_call_gets_rules_that_fire_and_a_dashboard() {
    let objects = objects(&[&PRODUCTION[..], &[WATCHED]].concat()).await;
    let rule = find(&objects, "PrometheusRule", "harmonia-ci").unwrap();
    assert_eq!(rule["metadata"]["labels"]["release"], "prometheus");
    let map = find(&objects, "ConfigMap", "harmonia-ci-dashboard").unwrap();
    assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
    let dashboard: Value = serde_json::from_str(map["data"]["harmonia-ci.json"].as_str().unwrap()).unwrap();
    assert!(dashboard["panels"].as_array().unwrap().len() > 10);

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, serde_json::to_string(&rule["spec"]).unwrap()).unwrap();
    run("promtool", &["check", "rules", "--lint=all", "--lint-fatal", file.to_str().unwrap()]).await.unwrap();
    let tests = root().join("tests/tests/apiserver/alerts.yaml");
    let tested = run("promtool", &["test", "rules", tests.to_str().unwrap()]).await;
    tested.unwrap_or_else(|complaint| panic!("{complaint}"));

    let none = self::objects(&PRODUCTION).await;
    assert!(kinds(&none).is_disjoint(&BTreeSet::from(["ServiceMonitor", "PodMonitor", "PrometheusRule"])));
}

#[tokio::test]
async fn alerts_and_dashboard_speak_of_metrics_that_there_are_and_every_alert_says_what_to_do() {
    let read = |file: &str| fs::read_to_string(root().join(file)).unwrap();
    let (metrics, advice) = (read("docs/reference/metrics.md"), read("docs/operations.md"));
    let rules: Value = serde_saphyr::from_str(&read("charts/harmonia-ci/files/alerts.yaml")).unwrap();
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        let alert = rule["alert"].as_str().unwrap();
        assert!(advice.contains(&format!("| `{alert}` |")), "{alert} is not in docs/operations.md");
    }
    for file in ["alerts.yaml", "dashboard.json"] {
        let text = read(&format!("charts/harmonia-ci/files/{file}"));
        let mut seen = 0;
        for word in text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let Some(rest) = word.strip_prefix("harmonia_ci_") else { continue };
            let metric = rest.strip_suffix("_bucket").unwrap_or(rest);
            assert!(metrics.contains(&format!("| `harmonia_ci_{metric}` |")), "{file}: there is no {word}");
            seen += 1;
        }
        assert!(seen > 10, "{file}");
    }
}

#[tokio::test]
async fn the_api_server_accepts_every_object() {
    let namespace = Namespace::new("chart").await;
    let here = format!("--namespace={}", namespace.name());
    let ingress = "--set=ingress.enabled=true,ingress.host=ci.example.org,ingress.tlsSecret=tls";
    let peers = "--set-json=networkPolicy.metricsFrom=[{\"namespaceSelector\":{}}]";
    let watched = format!("--set=watchNamespaces={{{}}}", namespace.name());
    for options in [
        &[&QUICKSTART[..], &["--set=quickstart.persistence.enabled=true"]].concat(),
        &[&PRODUCTION[..], &[ingress, peers, &watched]].concat(),
    ] {
        let options = [&[here.as_str()][..], options].concat();
        let manifests = render(&options).await.unwrap();
        try_kubectl(&["apply", "--dry-run=server", "--filename=-", &here], &manifests).await.unwrap();
    }
}

#[tokio::test]
async fn every_pod_is_restricted() {
    let namespace = Namespace::new("chart").await;
    let level = "pod-security.kubernetes.io/enforce=restricted";
    try_kubectl(&["label", "namespace", namespace.name(), level], "").await.unwrap();
    let here = format!("--namespace={}", namespace.name());
    let mut tried = 0;
    for object in objects(&[&QUICKSTART[..], &[here.as_str()]].concat()).await {
        let (Some(kind), Some(name)) = (object["kind"].as_str(), object["metadata"]["name"].as_str()) else {
            continue;
        };
        let spec = match kind {
            "Pod" => &object["spec"],
            "Deployment" | "StatefulSet" | "Job" => &object["spec"]["template"]["spec"],
            _ => continue,
        };
        // Without an account that only an installation makes.
        let mut spec = spec.clone();
        spec.as_object_mut().unwrap().remove("serviceAccountName");
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        let said = try_kubectl(&["apply", "--dry-run=server", "--filename=-", &here], &pod.to_string()).await;
        assert!(said.is_ok(), "{kind} {name}: {said:?}");
        tried += 1;
    }
    assert_eq!(tried, 5);
}

#[tokio::test]
async fn upgrade_and_rollback_keep_what_was_generated_and_a_new_installation_takes_it_over() {
    let namespace = Namespace::new("chart").await;
    let here = format!("--namespace={}", namespace.name());
    // Other tests have definitions of their own.
    let run = async |verb: &str, options: &[&str]| {
        let words =
            [verb, "farm", &chart(), &here, "--set=crds.install=false,fullnameOverride=farm", QUICKSTART[0]];
        helm(&[&words, options].concat()).await.unwrap()
    };
    let secrets = async || {
        let mut data = Vec::new();
        for name in ["secret/farm-postgres", "secret/farm-s3", "secret/farm-signing"] {
            data.push(namespace.get(name).await["data"].clone());
        }
        data
    };

    let notes = run("install", &[]).await;
    let token = format!("kubectl --namespace {} get secret farm-admin-token", namespace.name());
    assert!(notes.contains(&token), "{notes}");
    let generated = secrets().await;
    assert!(generated.iter().all(Value::is_object), "{generated:?}");

    run("upgrade", &["--set=operator.replicas=2"]).await;
    assert_eq!(namespace.get("deployment/farm-operator").await["spec"]["replicas"], 2);
    assert_eq!(secrets().await, generated);

    helm(&["rollback", "farm", &here]).await.unwrap();
    assert_eq!(namespace.get("deployment/farm-operator").await["spec"]["replicas"], 1);
    assert_eq!(secrets().await, generated);

    // Nothing runs here that could run a hook.
    helm(&["uninstall", "farm", &here, "--no-hooks"]).await.unwrap();
    assert_eq!(namespace.get("deployment/farm-operator").await, Value::Null);
    run("install", &[]).await;
    assert_eq!(secrets().await, generated);
    helm(&["uninstall", "farm", &here, "--no-hooks"]).await.unwrap();
}
