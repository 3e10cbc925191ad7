{{/* What the pods of routers, engines and tests have in common. */}}

{{- define "octavo.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "octavo.containerSecurityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The first lines of a pod's spec. Takes root, spec (of a component: placement) and selector. */}}
{{- define "octavo.podBasics" -}}
serviceAccountName: {{ include "octavo.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ include "octavo.podSecurityContext" . | nindent 2 }}
{{- with .spec.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if .spec.topologySpread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ .selector | nindent 8 }}
{{- end }}
{{- end -}}

{{/* A gRPC probe. Takes port, service, periodSeconds, failureThreshold. */}}
{{- define "octavo.grpcProbe" -}}
grpc:
  port: {{ .port }}
  service: {{ .service }}
periodSeconds: {{ .periodSeconds }}
timeoutSeconds: 5
failureThreshold: {{ .failureThreshold }}
{{- end -}}

{{/* Where processes may write, and how they find a model. Takes root and usesHub. */}}
{{- define "octavo.env" -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/octavo
- name: HF_HOME
  value: /var/cache/octavo/huggingface
- name: TRITON_CACHE_DIR
  value: /var/cache/octavo/triton
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- if .usesHub }}
{{- with .root.Values.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .root.Values.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end -}}

{{/* What routers and engines have besides: where traces go, and whatever the values add. Takes the root. */}}
{{- define "octavo.serverEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .samplingRatio | quote }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Options for traces, as a JSON object. */}}
{{- define "octavo.tracingOptions" -}}
{{- ternary (dict "otel_traces" true) dict (ne .Values.tracing.endpoint "") | toJson -}}
{{- end -}}

{{/* Options for the Secret of internal TLS, as a JSON object. */}}
{{- define "octavo.internalTlsOptions" -}}
{{- if .Values.tls.internalSecretName -}}
{{- dict "internal_tls_certificate" "/etc/octavo/internal/tls.crt" "internal_tls_key" "/etc/octavo/internal/tls.key"
    "internal_tls_ca" "/etc/octavo/internal/ca.crt" | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/* A Secret as a volume. Takes name, secret and, where only some keys are wanted, items. */}}
{{- define "octavo.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    {{- with .items }}
    items:
      {{- range . }}
      - { key: {{ . }}, path: {{ . }} }
      {{- end }}
    {{- end }}
{{- end -}}

{{/* A table of a TOML file. JSON's numbers, strings, booleans and arrays of them are TOML's. */}}
{{- define "octavo.tomlTable" -}}
[{{ .name }}]
{{- range $key, $value := .values }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end -}}

{{/*
Seconds from deletion to SIGKILL. Takes what (whose it is, for the message), asked (0: as long as is needed), and needed: the preStop
hook and the whole drain. Ten more than needed; what is asked for must be more than needed.
*/}}
{{- define "octavo.terminationGrace" -}}
{{- if not .asked -}}
{{- add .needed 10 -}}
{{- else if le (int .asked) (int .needed) -}}
{{- fail (printf "%s: terminationGraceS is %d: preStop and drain take up to %d s, so that requests would be killed; give more, or less drain_grace_s" .what (int .asked) (int .needed)) -}}
{{- else -}}
{{- int .asked -}}
{{- end -}}
{{- end -}}
