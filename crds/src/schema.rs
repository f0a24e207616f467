//! What the derives leave to be said: rules that several fields share, and a schema that people can read.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::core::Rule;
use serde_json::Value;

use crate::quantity::{SIZE, SPAN};

/// A rule with the sentence that a person reads who breaks it.
pub(crate) fn rule(holds: impl Into<String>, sentence: &str) -> Rule {
    Rule::new(holds).message(sentence)
}

/// A time within bounds.
pub(crate) fn between(least: &str, most: &str) -> Rule {
    rule(
        format!(
            "self.matches('{SPAN}') && duration(self) >= duration('{least}') && duration(self) <= duration('{most}')"
        ),
        &format!("write a time from {least} to {most}, such as 90s, 30m, 2h or 1h30m"),
    )
}

/// A size within bounds, without the fractions of bytes that `100m` would be.
pub(crate) fn sized(least: &str, most: &str) -> Rule {
    rule(
        format!(
            "self.matches('{SIZE}') && !quantity(self).isLessThan(quantity('{least}')) \
             && !quantity(self).isGreaterThan(quantity('{most}'))"
        ),
        &format!("write a size from {least} to {most}, such as 64Mi or 100Gi"),
    )
}

/// One field is a shorter time than another. Says nothing about what is no time: that field's own rule does.
pub(crate) fn shorter(field: &str, than: &str) -> Rule {
    rule(
        format!(
            "!self.{field}.matches('{SPAN}') || !self.{than}.matches('{SPAN}') \
             || duration(self.{field}) < duration(self.{than})"
        ),
        &format!("{field} must be shorter than {than}"),
    )
}

/// A list of texts in CEL.
pub(crate) fn list<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = texts.into_iter().map(|text| format!("'{text}'")).collect();
    format!("[{}]", quoted.join(", "))
}

/// The names of both kinds become parts of other names.
pub(crate) fn short_name() -> Rule {
    rule(
        "self.metadata.name.size() <= 40 && !self.metadata.name.contains('.')",
        "the name must have at most 40 characters and no dot: pods and labels are named after it",
    )
}

/// Without `nullable`, since a null is then dropped before any rule sees it, and with one line for each paragraph, since
/// `kubectl explain` breaks lines itself.
pub(crate) fn readable(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) =
            version.schema.as_mut().and_then(|validation| validation.open_api_v3_schema.as_mut())
        {
            tidy(schema);
        }
    }
    crd
}

/// The same with sorted keys and without fractions that are none, so that a change of the types is all that a diff shows.
pub(crate) fn plain(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let sorted: BTreeMap<String, Value> =
                map.into_iter().map(|(key, value)| (key, plain(value))).collect();
            sorted.into_iter().collect()
        }
        Value::Array(items) => items.into_iter().map(plain).collect(),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 => Value::from(float as i64),
            _ => number.into(),
        },
        other => other,
    }
}

fn tidy(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    if schema.x_kubernetes_int_or_string == Some(true) {
        // A page on how Kubernetes writes numbers.
        schema.description = None;
    }
    if let Some(text) = &mut schema.description {
        let paragraphs: Vec<String> = text.split("\n\n").map(|lines| lines.replace('\n', " ")).collect();
        *text = paragraphs.join("\n");
    }
    for property in schema.properties.iter_mut().flat_map(|all| all.values_mut()) {
        tidy(property);
    }
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => tidy(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(tidy),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        tidy(values);
    }
}
